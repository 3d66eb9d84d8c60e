"""The `[privacy]` table."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from motley.settings import Settings


class PrivacySettings(Settings):
    """Differential privacy of the clients' updates, applied on the client."""

    clip: float = Field(default=0.0, ge=0, le=1e20)
    """Maximum norm of a client's delta over all parameters; larger deltas are scaled down to it.
    0: no differential privacy.
    """
    noise: float = Field(default=0.0, ge=0, le=1e10)
    """Standard deviation of the Gaussian noise that a client adds to every parameter's delta, as a
    multiple of `clip`.
    """
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The delta for which epsilon is reported. It should be well below 1 / number of clients."""
    reveal_scores: bool = False
    """Whether clients report scores of models of their own, or on test examples of their own,
    although nothing noises them. The server then learns from every scored client how many test
    examples its model predicts correctly, which depends on the client's data, and epsilon does not
    cover that. False: such scores are not collected, in simulations as on nodes.
    """

    @field_validator("clip")
    @classmethod
    def _clip_is_not_rounded_away(cls, clip: float) -> float:
        # In single precision, noise on much smaller numbers is rounded to a few values or to zero.
        # A node gets these settings from a server that it need not trust.
        if 0 < clip < 1e-20:
            raise ValueError("should be 0, or at least 1e-20")
        return clip

    @property
    def active(self) -> bool:
        """Whether clients clip their deltas, and withhold everything else."""
        return self.clip > 0

    @property
    def withholds_scores(self) -> bool:
        """Whether clients report no scores. This is the one rule for all engines."""
        return self.active and not self.reveal_scores

    @model_validator(mode="after")
    def _noise_needs_clip(self) -> PrivacySettings:
        if self.noise and not self.clip:
            raise ValueError(
                f"noise = {self.noise:g} is in units of clip, which is 0: give clip a value above 0"
            )
        return self

    def weaker_than(self, required: PrivacySettings) -> str | None:
        """Explain how these settings fall short of a node's requirements; None if they do not."""
        if not required.active:
            return None
        if not self.active:
            needed = f"privacy.clip = {required.clip:g}"
            return f"privacy.clip = 0 protects nothing; this node requires {needed}."
        if self.noise < required.noise:
            needed = f"{required.noise:g}"
            return f"privacy.noise = {self.noise:g}; this node requires at least {needed}."
        return None
