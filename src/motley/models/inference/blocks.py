"""A model's head, its repeated blocks and the pairs of layers that InCo mixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from motley.models.chunks import chunks_of
from motley.models.inference.record import InferenceError, Operation, Recording, Ref
from motley.models.spec import CrossLayer

#: Layers whose parameters are weights and biases of a linear map.
LINEAR_MAPS = ("linear", "conv1d", "conv2d", "conv3d")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: The part of a stage's parameters that its blocks have, at least.
MOST_OF_A_STAGE = 0.7
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def single_output(model: nn.Module, recording: Recording) -> int:
    """Return the value that a model returns. It must be one tensor."""
    output = recording.output
    if isinstance(output, Ref):
        return output.value
    if isinstance(output, tuple | list):
        detail = f"a {type(output).__name__} of {len(output)}"
    else:
        detail = f"a {type(output).__name__}"
    raise InferenceError(
        f"{type(model).__name__} returns {detail}. Motley trains models that return one tensor of "
        "logits: wrap the model in a module whose forward returns it."
    )


def find_head(model: nn.Module, recording: Recording, classes: int) -> tuple[str, int]:
    """Return the path of the last layer, and the number of its operation.

    This is the linear map with one output per class from which the model's output is computed.
    """
    value = single_output(model, recording)
    while recording.values[value].operation >= 0:
        number = recording.values[value].operation
        operation = recording.operations[number]
        if operation.name in LINEAR_MAPS:
            weight = operation.argument(1, "weight")
            path = _path_of_weight(model, recording, operation, weight.value)
            outputs = recording.values[weight.value].shape[0]
            if not path:
                break
            if outputs != classes:
                raise InferenceError(
                    f"the last layer, {path!r}, has {outputs} outputs, and the data has {classes} "
                    "classes. Let the factory take num_classes, or declare ModelSpec.head."
                )
            return path, number
        inputs = set()
        for number in operation.inputs:
            tensor = recording.values[number]
            if tensor.depends and tensor.floating:
                inputs.add(number)
        if len(inputs) != 1:
            raise InferenceError(
                f"{recording.describe(operation)} computes the output from {len(inputs)} "
                "tensors, so there is no single last layer. Declare ModelSpec.head."
            )
        (value,) = inputs
    raise InferenceError(
        f"{type(model).__name__} has no linear layer or convolution that computes its output. "
        "Declare ModelSpec.head."
    )


def _path_of_weight(
    model: nn.Module, recording: Recording, operation: Operation, weight: int
) -> str:
    """Return the module that an operation's weight belongs to, or an empty path.

    A weight that is also an embedding has two names; the module that made the call decides.
    """
    name = recording.values[weight].name
    names = [name, *(other for other, first in recording.aliases.items() if first == name)]
    paths = [name.rpartition(".")[0] for name in names if name]
    if operation.layer in paths:
        return operation.layer
    return paths[0] if paths else ""


def find_blocks(model: nn.Module, recording: Recording) -> tuple[str, ...]:
    """Return the paths of the repeated blocks in the order in which they run.

    A block is a child of a Sequential, ModuleList or ModuleDict, and there are several of its
    class, or it is the only child. Of several such classes, the one with the most parameters is
    taken: inverted residuals, not the convolutions around them.
    """
    by_class: dict[type[nn.Module], list[str]] = {}
    for path, module in _candidates(model):
        paths = by_class.setdefault(type(module), [])
        if not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    best: list[str] = []
    best_size = 0
    for paths in by_class.values():
        size = _num_parameters(model, paths)
        if (len(paths) > 1 or _is_only_child(model, paths[0])) and size > best_size:
            best, best_size = paths, size
    best = _innermost(model, best, list(by_class.values()))
    ran: dict[str, None] = {}  # used as an ordered set
    for call in recording.calls:
        if call.path in best:
            ran[call.path] = None
    return tuple(ran)


def _innermost(model: nn.Module, blocks: list[str], others: list[list[str]]) -> list[str]:
    """Return the modules inside of `blocks` if they make up most of them, else `blocks`.

    The modules that looked like blocks are then stages, and the modules in them are the blocks.
    """
    prefixes = tuple(f"{path}." for path in blocks)
    for paths in others:
        inside = [path for path in paths if path.startswith(prefixes)]
        # A convolution with its norm is a layer of a block, not a block.
        if any(len(_matrices(model.get_submodule(path))) < 2 for path in inside):
            continue
        if len(inside) <= len(blocks):
            continue
        if _num_parameters(model, inside) >= MOST_OF_A_STAGE * _num_parameters(model, blocks):
            return _innermost(model, inside, others)
    return blocks


def _num_parameters(model: nn.Module, paths: Iterable[str]) -> int:
    """Return the number of parameters in some modules of a model."""
    count = 0
    for path in paths:
        count += sum(parameter.numel() for parameter in model.get_submodule(path).parameters())
    return count


def _is_only_child(model: nn.Module, path: str) -> bool:
    """Tell whether a module is alone in its container, as the block of a Transformer of depth 1."""
    parent, child = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    is_plain = type(child).__module__.startswith("torch.nn.")
    return len(list(parent.children())) == 1 and not is_plain


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may be blocks, with their paths."""
    for path, parent in model.named_modules():
        if not isinstance(parent, CONTAINERS):
            continue
        for name, child in parent.named_children():
            if _may_be_block(child, in_list=isinstance(parent, nn.ModuleList)):
                yield (f"{path}.{name}" if path else name), child


def _may_be_block(module: nn.Module, in_list: bool) -> bool:
    """Tell whether a module may be a block: it has several layers, or is a layer in a list."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, *NORMS)):
        return False
    if isinstance(module, nn.Sequential) and _contains_blocks(module):
        return False
    num_layers = 0
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            num_layers += 1
    return num_layers > 1 or (in_list and num_layers == 1)


def _contains_blocks(sequence: nn.Sequential) -> bool:
    """Tell whether a sequence consists of blocks, as a stage of a ResNet does."""
    for child in sequence.children():
        if len(list(child.parameters())) > 1 and list(child.children()):
            return True
    return False


def find_pairs(model: nn.Module, blocks: tuple[str, ...]) -> list[CrossLayer]:
    """Return the pairs of parameters that InCo mixes, by the readings of its authors.

    - Blocks with several layer norms of one shape (Transformers): the first norm of a block helps
      the others of the same block.
    - Other blocks: blocks that follow each other in one container are a stage. A weight of its
      first block helps the weights of the same shape of all later blocks. If several fit, the
      last one that later blocks have too is taken: conv2 of a ResNet's basic block.
    - Recurrent layers of several levels: a weight of the first level helps the weights of later
      levels.
    """
    pairs: list[CrossLayer] = []
    first = ""
    for path in blocks:
        norms = _norm_pairs(model, path)
        if norms:
            pairs += norms
            continue
        helped = _block_pairs(model, first, path) if _siblings(first, path) else []
        if not helped:
            first = path
        pairs += helped
    # Recurrent layers inside of blocks are helped by the first block already.
    helped_names = {pair.target for pair in pairs}
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            for pair in _recurrent_pairs(model, path, module):
                if pair.target not in helped_names:
                    pairs.append(pair)
    return pairs


def _siblings(first: str, path: str) -> bool:
    return bool(first) and first.rpartition(".")[0] == path.rpartition(".")[0]


def _norm_pairs(model: nn.Module, block: str) -> list[CrossLayer]:
    norms = []
    for name, layer in model.get_submodule(block).named_modules():
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and layer.weight is not None:
            norms.append((f"{block}.{name}.weight", layer.weight.shape))
    if len(norms) < 2:
        return []
    source, shape = norms[0]
    return [CrossLayer(source, name) for name, other in norms[1:] if other == shape]


def _block_pairs(model: nn.Module, first: str, later: str) -> list[CrossLayer]:
    sources = _matrices(model.get_submodule(first))
    targets = _matrices(model.get_submodule(later))
    if not any(sources.get(name) == shape for name, shape in targets.items()):
        return []
    # Shape -> the last weight of the first block that has it, and that the later block has too.
    source_of = {shape: name for name, shape in sources.items() if name in targets}
    pairs = []
    for target, shape in targets.items():
        if shape in source_of:
            source, name = f"{first}.{source_of[shape]}", f"{later}.{target}"
            pairs.append(CrossLayer(source, name, chunks_of(model, name)))
    return pairs


def _matrices(block: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the weights of a block that are no vectors, with their shapes."""
    return {name: tuple(p.shape) for name, p in block.named_parameters() if p.dim() > 1}


def _recurrent_pairs(model: nn.Module, path: str, module: nn.RNNBase) -> list[CrossLayer]:
    prefix = f"{path}." if path else ""
    firsts: dict[tuple[str, tuple[int, ...]], str] = {}
    pairs = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2:
            continue
        role, _, level = name.partition("_l")
        direction = "_reverse" if level.endswith("_reverse") else ""
        key = (role + direction, tuple(parameter.shape))
        first = firsts.setdefault(key, name)
        if first != name:
            target = f"{prefix}{name}"
            pairs.append(CrossLayer(f"{prefix}{first}", target, chunks_of(model, target)))
    return pairs


def is_major(recording: Recording, operation: Operation) -> bool:
    """Tell whether an operation has a weight of two or more dimensions."""
    return any(
        recording.values[value].name and len(recording.values[value].shape) > 1
        for value in operation.inputs
    )
