"""Names in one pipeline stage, seen from the whole model and from other stages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from layerzero.errors import ConfigError


@dataclass(frozen=True)
class StageNames:
    """How names in a pipeline stage relate to the whole model and to other stages.

    Attributes:
        model_fqn: from names in the stage to names in the whole model: a function, or prefixes (of whole names
            between dots) and what replaces them, the longest that fits; None where they are the same.
        tied: parameters of which other stages hold copies, such as an embedding that the head shares: by name
            in the stage, any name that all copies have in common. `Pipeline` keeps the copies equal.
    """

    model_fqn: Callable[[str], str] | Mapping[str, str] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def check(self, module: nn.Module) -> None:
        """Raise ConfigError for tied names that are no parameters."""
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name in self.tied:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3)
                hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise ConfigError(f"tied: {type(module).__name__} has no parameter {name!r}{hint}")
        tied: dict[str, str] = {}
        for name, common in self.tied.items():
            other = tied.setdefault(common, name)
            if module.get_parameter(other) is not module.get_parameter(name):
                raise ConfigError(
                    f"tied: {other!r} and {name!r} of one stage are both tied to {common!r} but are two parameters: "
                    f"assign one of them to the other, as in a model that is not split"
                )

    def in_model(self, fqn: str) -> str:
        """Name in the whole model of what is ``fqn`` in the stage."""
        if callable(self.model_fqn):
            return self.model_fqn(fqn)
        for prefix, replacement in sorted((self.model_fqn or {}).items(), key=lambda item: -len(item[0])):
            if fqn == prefix or fqn.startswith(prefix + "."):
                return replacement + fqn[len(prefix) :]
        return fqn
