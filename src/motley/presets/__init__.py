"""The papers' settings and our own, one TOML file each; its first line is a summary."""
