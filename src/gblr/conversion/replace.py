"""Putting a layer into the place of another."""

from torch import nn

from gblr.layers.split import SplitLinear

# What `nn.Module` keeps of hooks around a call. Those of state dicts go: they know names of the old layer's tensors.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip
_STRUCTURE = ("width_frac", "location_frac")


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Sets the submodule `name`, and turns off what torch's own modules around it do past their layers. Training mode,
    what is frozen, and hooks are those of the layer that stood there.

    In eval mode `nn.TransformerEncoderLayer` reads the weights itself for a fused kernel, and `nn.TransformerEncoder`
    hands padded batches on as nested tensors, which that kernel alone takes.
    """
    parts = name.split(".")
    for depth in range(len(parts)):
        around = model.get_submodule(".".join(parts[:depth]))
        if isinstance(around, nn.TransformerEncoderLayer):
            around.activation_relu_or_gelu = 0
        elif isinstance(around, nn.TransformerEncoder):
            around.use_nested_tensor = False
    old = getattr(around, parts[-1])
    if old is not layer:
        _take_over(old, layer)
        setattr(around, parts[-1], layer)


def replace_everywhere(model: nn.Module, layers: dict[nn.Module, nn.Module]) -> None:
    """Sets the new layer for each old one, under all names of the old one: what is shared stays so."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if layers.get(module, module) is not module:
            replace_layer(model, name, layers[module])


def _take_over(old: nn.Module, new: nn.Module) -> None:
    freeze_like(old, new)
    new.train(old.training)
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]  # the very same dicts, so that handles still remove what they registered
    if hook := vars(old).get("_hf_hook"):
        from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]

        add_hook_to_module(new, hook)  # moves inputs to the layer's device, in a model that lies on several
    if isinstance(old, SplitLinear) and isinstance(new, SplitLinear):
        for part, new_part in zip(old.parts, new.parts, strict=False):
            _take_over(part, new_part)


def freeze_like(old: nn.Module, new: nn.Module) -> None:
    """Parameters of the same name are frozen alike; others by what they are: contents of a matrix are frozen where the
    weight is, and so is its structure, unless it was there before; the bias where the bias is.
    """
    same: dict[str, bool] = {}
    roles: dict[str, bool] = {}
    for name, parameter in old.named_parameters():
        same[name] = parameter.requires_grad
        roles[_role(name)] = roles.get(_role(name), False) or parameter.requires_grad
    default = roles.get("content", True)
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(same.get(name, roles.get(_role(name), default)))


def _role(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return "bias" if leaf == "bias" else "structure" if leaf in _STRUCTURE else "content"
