"""One TOML file is one run. The whole configuration is checked before anything starts.

schema.py       all tables of a configuration, and combinations that cannot work
display.py      saved configurations, for readers without the user's own code
layers.py       presets, files and overrides, and the rule by which they are merged
paper_names.py  the papers' names (HeteroProx, InCoNova, ...) and the settings they stand for
renames.py      settings that had other names in earlier versions
"""

from motley.config.display import for_display, missing_plugins
from motley.config.layers import (
    Resolved,
    absolute_paths,
    from_saved,
    load_config,
    load_with_origins,
    parse_overrides,
    path_settings,
    presets,
    read_resolved,
    read_toml,
    resolve,
    with_overrides,
)
from motley.config.schema import (
    Config,
    FederationSettings,
    ModelSettings,
    RecalibrationSettings,
    ServerSettings,
    TaskSettings,
)

__all__ = [
    "Config",
    "FederationSettings",
    "ModelSettings",
    "RecalibrationSettings",
    "Resolved",
    "ServerSettings",
    "TaskSettings",
    "absolute_paths",
    "for_display",
    "from_saved",
    "load_config",
    "load_with_origins",
    "missing_plugins",
    "parse_overrides",
    "path_settings",
    "presets",
    "read_resolved",
    "read_toml",
    "resolve",
    "with_overrides",
]
