"""A client's training as its algorithm sees it: the model, the batch, and named tensors.

`Step` is all that a client algorithm may touch. `motley.client.learner.Learner` implements it,
eagerly on a CPU or as a captured CUDA graph, and an algorithm cannot tell the difference. Three
rules follow from the captured graph:

- Change tensors in place (`motley.core.tensors`). A graph that is replayed for the next client
  reads and writes the same memory.
- Do not read a tensor's value (`float(t)`, `if t > 0`) in a step. A graph records operations on the
  device, not decisions of the host.
- Python numbers are frozen when the step is captured. Values that change from client to client or
  from round to round are tensors: `lr`, `round`, `broadcast`, `client_state`, `scratch`.

The rules are for steps (`loss`, `after_backward`, `after_step`, `train_step`). The hooks
`before_training`, `finish` and `collect` are not captured and may read values, at the price of
waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, nn

from motley.core.part import State

#: A proximal term in d = params - center, with | | for the Euclidean norm of a tensor.
#: squared: mu / 2 |d|^2. norms: mu / 2 times the sum of |d| over tensors. norm-of-squares: mu / 2
#: times the sum of |d * d| over tensors, which is what `torch.norm(d ** 2)` computes.
Proximal: TypeAlias = Literal["squared", "norms", "norm-of-squares"]


class Step(Protocol):
    """One client in training. Tensors by name are under the client's own names."""

    # ---- the model and the batch

    #: The client's model, in training mode.
    model: nn.Module
    #: The batch of this step.
    inputs: Tensor
    targets: Tensor

    # ---- tensors by name

    #: The parameters, in single precision. Call `sync` after changing them.
    params: State
    #: Parameters and buffers.
    state: State
    #: Parameters and buffers as the client received them. Do not change them.
    received: State
    #: The method's broadcast (`ServerAlgorithm.broadcast`). Do not change it.
    broadcast: State
    #: The client's state from its last training, or its initial one. Do not change it.
    client_state: State
    #: Tensors that the algorithm keeps while the client trains, see `keep`.
    scratch: dict[str, State]

    # ---- numbers

    #: The learning rate; on a GPU a tensor.
    lr: Tensor | float
    #: The round, as a tensor: for use in a step.
    round: Tensor
    #: Steps taken so far: for use outside of steps.
    num_steps: int
    #: The phase of the current step (`ClientAlgorithm.phase`), a number that steps may branch on.
    phase: int
    #: Steps that the client takes in this round, and steps of one epoch over its examples: for use
    #: outside of steps. Both are 0 if it does not train.
    total_steps: int
    epoch_steps: int

    @property
    def round_number(self) -> int:
        """The round, as a number: for use outside of steps."""
        ...

    @property
    def size(self) -> str:
        """The client's model size."""
        ...

    @property
    def grads(self) -> State:
        """The gradients of the last `backward`, plus the proximal terms added since.

        They are in single precision, without a loss scale, and may be changed in place. Parameters
        that the loss did not reach are absent.
        """
        ...

    # ---- actions

    def task_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the task's mean loss of a batch, in single precision.

        For classification this is cross-entropy, with label smoothing if the run asks for it. If
        `targets` is `step.targets` itself, mixup and logit adjustment are part of the loss, too
        (`motley.client.training_loss`).
        """
        ...

    def backward(self, loss: Tensor, names: Collection[str] | None = None) -> None:
        """Compute the gradients of a loss; they replace the gradients of the last `backward`.

        With `names`, only these parameters get gradients, and the pass ends at the first layer that
        has one of them: for a model's head it costs next to nothing.
        """
        ...

    def proximal(
        self,
        mu: float | Mapping[str, float],
        center: State | None = None,
        *,
        term: Proximal = "squared",
    ) -> None:
        """Add `mu * (params - center)`, the gradient of `mu / 2 |params - center|^2`, to `grads`.

        `center` is `received` by default; parameters that are not in it have no term. `mu` may be
        one number per name. For the other terms, see `Proximal`.
        """
        ...

    def optimize(self, names: Iterable[str] | None = None, *, clip: bool = False) -> None:
        """Clip the gradients if the run asks for it, and let the optimizer change the parameters.

        With `names`, only these parameters change, by an optimizer of their own. Their gradients
        are clipped, by their own norm, only with `clip`.
        """
        ...

    def sync(self) -> None:
        """Let the model compute with `params` as they are now, also if it computes in 16 bits."""
        ...

    def preserve_weights(self) -> AbstractContextManager[None]:
        """Restore parameters and buffers at the end of a block; gradients stay."""
        ...

    def preserve_buffers(self) -> AbstractContextManager[None]:
        """Restore buffers at the end of a block: a pass that leaves running statistics alone."""
        ...

    def frozen(
        self,
        state: State,
        inputs: Tensor,
        forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the output of this architecture with another state.

        It runs in evaluation mode and without gradients. `forward(model, inputs)` is a plain call
        of the model by default.
        """
        ...

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into `scratch[name]`, which stays in place. Not for use in a step.

        Tensors of an earlier client or round stay in `scratch` until they are replaced.
        """
        ...

    def as_inputs(self, images: Tensor) -> Tensor:
        """Return images in the type in which the model computes, such as public images."""
        ...

    def as_features(self, features: Tensor) -> Tensor:
        """Return activations in the type in which the model computes, such as received features."""
        ...

    def first_inputs(self, count: int) -> Tensor:
        """Return the client's first `count` inputs of this round, as it trained on them.

        If it has fewer, they repeat. Not for use in a step.
        """
        ...

    def class_counts(self, num_classes: int) -> Tensor:
        """Return how many examples the client has of each class. Not for use in a step."""
        ...
