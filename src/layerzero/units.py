"""Which modules become units, and which parameters each of them owns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from layerzero.errors import ConfigError, ShardingError

UnitSpec = str | type[nn.Module] | nn.Module
UnitPredicate = Callable[[nn.Module], bool]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class OwnedParam:
    """One parameter and every place in the module tree that holds it."""

    param: nn.Parameter
    fqns: list[str]
    owners: list[tuple[nn.Module, str]]


@dataclass
class UnitPlan:
    """A module that becomes a unit, with the parameters that no unit below it owns."""

    name: str
    module: nn.Module
    params: list[OwnedParam] = field(default_factory=list)


def full_name(cls: type) -> str:
    """``module.Class`` as configurations write it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def find_ignored(root: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Modules (with everything below them) named by dotted attribute names.

    Raises:
        ConfigError: for a name that is no submodule, with near ones.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    ignored: set[nn.Module] = set()
    for name in names:
        if name not in modules or not name:
            near = difflib.get_close_matches(name, modules, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {_some(modules)}."
            raise ConfigError(f"ignored_modules: {type(root).__name__} has no submodule {name!r}; {hint}")
        ignored.update(modules[name].modules())
    return ignored


def choose_units(
    root: nn.Module,
    specs: Sequence[UnitSpec] | UnitPredicate | None,
    min_num_params: int | None,
    ignored: set[nn.Module],
) -> list[tuple[str, nn.Module]]:
    """Name and module of every unit below the root, in registration order.

    Raises:
        ConfigError: if a class or module is not found, with near ones.
    """
    candidates = [(n, m) for n, m in root.named_modules() if m is not root and m not in ignored]
    chosen: set[nn.Module] = set()
    if callable(specs) and not isinstance(specs, type):
        chosen.update(m for _, m in candidates if specs(m))
    elif specs is not None:
        assert isinstance(specs, Iterable)
        for spec in specs:
            chosen.update(_match(spec, root, candidates))
    if min_num_params is not None:
        _choose_by_size(root, min_num_params, ignored, chosen)
    if specs is None and min_num_params is None:
        repeated = set(getattr(root, "_no_split_modules", None) or ()) | set(
            getattr(root, "_repeated_blocks", None) or ()
        )
        chosen.update(m for _, m in candidates if type(m).__name__ in repeated)
    for name, module in candidates:
        if module in chosen and isinstance(module, _CONTAINERS):
            raise ConfigError(
                f"{name!r} is a {type(module).__name__}, which has no forward of its own and so can't be a unit: "
                f"name the class of its elements instead"
            )
    return [(name, module) for name, module in candidates if module in chosen]


def _match(spec: UnitSpec, root: nn.Module, candidates: list[tuple[str, nn.Module]]) -> list[nn.Module]:
    if isinstance(spec, nn.Module):
        if not any(m is spec for _, m in candidates):
            raise ConfigError(
                f"units: the given {type(spec).__name__} is no (sharded) submodule of {type(root).__name__}"
            )
        return [spec]
    if isinstance(spec, str):
        found = [m for _, m in candidates if any(_is_named(cls, spec) for cls in type(m).__mro__)]
    elif isinstance(spec, type):
        found = [m for _, m in candidates if isinstance(m, spec)]
    else:
        raise ConfigError(f"units: expected class names, classes or modules, got {spec!r}")
    if found:
        return found
    wanted = spec if isinstance(spec, str) else full_name(spec)
    classes = {full_name(type(m)) for _, m in candidates}
    short = {name.rsplit(".", 1)[-1]: name for name in classes}
    near = difflib.get_close_matches(wanted.rsplit(".", 1)[-1], short, n=3, cutoff=0.5)
    listed = ", ".join(short[n] for n in near) if near else _some(sorted(classes))
    raise ConfigError(
        f"no module of class {wanted!r} in {type(root).__name__} (transformer_layers or units); near ones: {listed}"
    )


def _is_named(cls: type, name: str) -> bool:
    full = full_name(cls)
    return full == name or full.endswith("." + name)


def _choose_by_size(module: nn.Module, minimum: int, ignored: set[nn.Module], chosen: set[nn.Module]) -> int:
    """Bottom-up: a module becomes a unit once it holds ``minimum`` parameters outside units. Returns what is left."""
    if isinstance(module, nn.MultiheadAttention):  # reads its out_proj's parameters without calling it
        return sum(p.numel() for p in module.parameters())
    rest = sum(p.numel() for p in module.parameters(recurse=False))
    for child in module.children():
        if child not in ignored:
            left = _choose_by_size(child, minimum, ignored, chosen)
            if child in chosen or (left >= minimum and not isinstance(child, _CONTAINERS)):
                chosen.add(child)
            else:
                rest += left
    return rest


def plan_units(root: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Module]) -> list[UnitPlan]:
    """Assign every parameter to the lowest unit that contains all its owners; the root's plan comes first.

    Raises:
        ShardingError: if an ignored module shares a parameter with the rest.
    """
    plans = {root: UnitPlan("", root)} | {module: UnitPlan(name, module) for name, module in units}
    containing: dict[nn.Module, list[nn.Module]] = {}  # root first

    todo: list[tuple[nn.Module, list[nn.Module]]] = [(root, [])]
    while todo:
        module, chain = todo.pop()
        if module in ignored:
            continue
        known = containing.get(module)
        if module in plans:
            chain = [*chain, module]
            if known is not None:
                continue
        elif known is not None:  # a module with two parents belongs to what contains both
            chain = [a for a, b in zip(known, chain, strict=False) if a is b]
            if len(chain) == len(known):
                continue
        containing[module] = chain
        todo += [(child, chain) for child in reversed(list(module.children()))]
    owned: dict[nn.Parameter, OwnedParam] = {}
    for prefix, module in root.named_modules():
        if module in ignored:
            continue
        for key, param in module._parameters.items():
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise ShardingError(f"{prefix or type(root).__name__!r} is lazy: run one forward before lz.shard")
            if param is not None:
                entry = owned.setdefault(param, OwnedParam(param, [], []))
                entry.fqns.append(f"{prefix}.{key}" if prefix else key)
                entry.owners.append((module, key))
    for module in ignored:
        for key, param in module._parameters.items():
            if param is not None and param in owned:
                raise ShardingError(
                    f"parameter {owned[param].fqns[0]!r} is shared with an ignored module (there as {key!r}), so it "
                    f"can be neither sharded nor left alone: ignore all of its owners or none"
                )
    for entry in owned.values():
        chains = [containing[owner] for owner, _ in entry.owners]
        common = [ms[0] for ms in zip(*chains, strict=False) if all(m is ms[0] for m in ms)]
        plans[common[-1]].params.append(entry)
    return list(plans.values())


def _some(names: Iterable[str], limit: int = 6) -> str:
    names = [n for n in names if n]
    return ", ".join(map(repr, names[:limit])) + (", ..." if len(names) > limit else "")
