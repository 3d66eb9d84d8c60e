"""The papers' settings and our own, one TOML file each; the first line says what it is."""
