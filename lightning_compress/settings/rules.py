"""Choose a compressor for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from lightning_compress.codecs import Dense, Method
from lightning_compress.core.layout import Layout
from lightning_compress.corrections import Corrected
from lightning_compress.exchanges.message import Section

KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "conv": (_ConvNd,),
    "linear": (nn.Linear, nn.Bilinear, nn.MultiheadAttention),
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    "other": (),
}
"""Module classes of each kind. ``other``: parameters of all other modules, such as recurrent layers."""


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Return the kind of every parameter, by name.

    It is the kind of the innermost module around the parameter that has one. So a bias has its layer's kind, and so
    have the parameters of a layer's subclass or parametrization. A parameter that two modules share has the first
    one's kind.
    """
    modules = dict(module.named_modules())
    return {name.replace("_orig_mod.", ""): _kind(modules, name) for name, _ in module.named_parameters()}


def _kind(modules: dict[str, nn.Module], name: str) -> str:
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        for kind, types in KINDS.items():
            if isinstance(modules[owner], types):
                return kind
    return "other"


Shape = tuple[int, ...]
Compressor = Method | Corrected


@dataclass(frozen=True)
class Rule:
    """A method for some parameters.

    Args:
        method: for the parameters that the rule takes.
        match: shell-style patterns of names; a parameter must match one of them, if there are any.
        kind: that parameters must have, or None.
    """

    method: Method
    match: tuple[str, ...] = ()
    kind: str | None = None

    def __str__(self) -> str:
        conditions = {"match": list(self.match), "kind": self.kind}
        return str({key: value for key, value in conditions.items() if value})

    def takes(self, name: str, kind: str) -> bool:
        """Return whether the rule takes a parameter, by its name and kind."""
        matches = not self.match or any(fnmatchcase(name, pattern) for pattern in self.match)
        return matches and self.kind in (None, kind)


@dataclass(frozen=True)
class Rules:
    """A method for every parameter: that of the first rule that takes it, else ``method``; small and 1-D ones dense.

    If ``method`` works element by element (a cast), it gets the small and 1-D parameters too, including those that a
    rule takes: it loses nothing there, and one dtype means one all-reduce.

    Args:
        method: for parameters that no rule takes.
        min_numel: parameters with fewer elements are sent as float32 (dense).
        rules: in order of priority.
        kinds: of the model's parameters, by name; empty until the rules are bound to a model.
        whole: shapes of parameters of which this rank holds a part only, by name. Rules decide by these, so that the
            method of a parameter does not depend on the number of shards.
    """

    method: Method
    min_numel: int
    rules: tuple[Rule, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    whole: Mapping[str, Shape] = field(default_factory=dict, repr=False, compare=False)

    def bound(self, kinds: Mapping[str, str], whole: Mapping[str, Shape] | None = None) -> Rules:
        """Return these rules for a model, some of whose parameters may be sharded."""
        return replace(self, kinds=kinds, whole=whole or {})

    @property
    def methods(self) -> list[Method]:
        """All methods, ``Dense`` first."""
        return [Dense(), *(rule.method for rule in self.rules if not isinstance(rule.method, Dense)), self.method]

    def method_of(self, name: str, shape: Shape) -> Method:
        """Return the method of a parameter, by its name and shape."""
        method = next((rule.method for rule in self.rules if rule.takes(name, self._kind(name))), self.method)
        shape = self.whole.get(name, shape)
        if method.elementwise or (len(shape) > 1 and prod(shape) >= self.min_numel):
            return method
        return self.method if self.method.elementwise else Dense()

    def of_kind(self, kind: str) -> frozenset[str]:
        """Return the names of all parameters of a kind; empty until the rules are bound to a model."""
        return frozenset(name for name, each in self.kinds.items() if each == kind)

    def _kind(self, name: str) -> str:
        return self.kinds.get(name, "other")

    def sections(self, parameters: Sequence[tuple[str, Shape]]) -> tuple[tuple[int, ...], tuple[Section, ...]]:
        """Order a group's parameters by method.

        Args:
            parameters: name and shape of each, in the bucket's order.

        Returns:
            The parameters' indices in the bucket, in the vector's order; and the vector's sections.
        """
        chosen = [self.method_of(*parameter) for parameter in parameters]
        order: list[int] = []
        sections: list[Section] = []
        dense, *others = self.methods
        for method in dict.fromkeys([*others, dense]):  # compressed sections first: they start 16-byte aligned
            indices = [index for index, each in enumerate(chosen) if each == method]
            if indices:
                start = sections[-1].stop if sections else 0
                layout = Layout.of(parameters[index] for index in indices)
                sections.append(Section(method, layout, start, number=self.methods.index(method)))
                order += indices
        return tuple(order), tuple(sections)

    def idle(self, parameters: Sequence[tuple[str, Shape]]) -> list[Rule]:
        """Return rules without effect, because all their parameters are small or 1-D and stay dense.

        Args:
            parameters: name and shape of each.
        """
        used = [self.method_of(*each) for each in parameters]
        return [rule for rule in self.rules if rule.method not in used]

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError if a rule takes none of the trained parameters, or one of its patterns matches none.

        Args:
            names: of the trained parameters.
        """
        hint = (
            f"Patterns are shell-style ('*.bias', 'head.*'), and the first names are {', '.join(names[:5])} (a shared "
            "parameter has its first name)"
        )
        for rule in self.rules:
            for pattern in rule.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(f"the rule {rule} takes no parameter by {pattern!r} that is trained. {hint}")
        free = list(names)
        for rule in self.rules:
            taken = [name for name in free if rule.takes(name, self._kind(name))]
            if not taken:
                kinds = ", ".join(sorted({self._kind(name) for name in names}))
                raise ValueError(
                    f"the rule {rule} takes no parameter that is trained and not taken by a rule before it, of the "
                    f"kinds {kinds}. {hint}"
                )
            if not isinstance(rule.method, Dense):
                free = [name for name in free if name not in taken]
