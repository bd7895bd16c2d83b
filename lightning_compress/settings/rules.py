"""Which parameter takes which codec."""

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
"""Modules of each kind; ``other`` is what none of them owns (recurrent layers, bare parameters)."""


def kinds_of(module: nn.Module) -> dict[str, str]:
    """The kind of every parameter, by its name: that of the innermost module around it that has one.

    A bias is of its layer's kind, and so is what a subclass of a layer, or a parametrization, owns. A parameter that
    two modules share is of the first one's kind.
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
    """Parameters that take a method of their own: those of the kind, if there is one, that match a pattern, if any."""

    method: Method
    match: tuple[str, ...] = ()
    kind: str | None = None

    def __str__(self) -> str:
        given = {"match": list(self.match), "kind": self.kind}
        return str({key: value for key, value in given.items() if value})

    def takes(self, name: str, kind: str) -> bool:
        """Whether the parameter is one of them."""
        matches = not self.match or any(fnmatchcase(name, pattern) for pattern in self.match)
        return matches and self.kind in (None, kind)


@dataclass(frozen=True)
class Rules:
    """Parameters travel by the first rule that takes them, or the method; small and 1-D ones as float32.

    A method that treats every element alone (a cast) is given the small and 1-D parameters too, those of the rules as
    well: it has nothing to lose there, and one dtype is one all-reduce.

    Args:
        method: for what no rule takes.
        min_numel: parameters with fewer elements stay dense.
        rules: in the order in which they are asked.
        kinds: of the parameters by name, found in the model that the rules are bound to.
    """

    method: Method
    min_numel: int
    rules: tuple[Rule, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def bound(self, kinds: Mapping[str, str]) -> Rules:
        """These rules for a model whose parameters are of these kinds."""
        return replace(self, kinds=kinds)

    @property
    def methods(self) -> list[Method]:
        """All methods, the one for what stays dense first."""
        return [Dense(), *(each.method for each in self.rules if not isinstance(each.method, Dense)), self.method]

    def method_of(self, name: str, shape: Shape) -> Method:
        """What takes care of this parameter."""
        method = next((rule.method for rule in self.rules if rule.takes(name, self._kind(name))), self.method)
        if method.elementwise or (len(shape) > 1 and prod(shape) >= self.min_numel):
            return method
        return self.method if self.method.elementwise else Dense()

    def of_kind(self, kind: str) -> frozenset[str]:
        """Names of the parameters of one kind; none where no model is known."""
        return frozenset(name for name, each in self.kinds.items() if each == kind)

    def _kind(self, name: str) -> str:
        return self.kinds.get(name, "other")

    def sections(self, parameters: Sequence[tuple[str, Shape]]) -> tuple[tuple[int, ...], tuple[Section, ...]]:
        """Order a group's parameters by method.

        Args:
            parameters: name and shape, in the bucket's order.

        Returns:
            the parameters' indices in the bucket, in the vector's order; and the vector's sections.
        """
        chosen = [self.method_of(*parameter) for parameter in parameters]
        order: list[int] = []
        sections: list[Section] = []
        dense, *others = self.methods
        for method in dict.fromkeys([*others, dense]):  # compressed ones begin where 16 bytes can be read at once
            number = self.methods.index(method)
            indices = [index for index, each in enumerate(chosen) if each == method]
            if indices:
                start = sections[-1].stop if sections else 0
                layout = Layout.of(parameters[index] for index in indices)
                sections.append(Section(method, layout, start, number=number))
                order += indices
        return tuple(order), tuple(sections)

    def idle(self, parameters: Sequence[tuple[str, Shape]]) -> list[Rule]:
        """Rules whose parameters all stay as they are, since they are small or 1-D.

        Args:
            parameters: name and shape.
        """
        used = [self.method_of(*each) for each in parameters]
        return [rule for rule in self.rules if rule.method not in used]

    def check(self, names: Sequence[str]) -> None:
        """Refuse patterns and rules that match nothing.

        Raises:
            ValueError: a rule takes no parameter, or one of its patterns matches none.
        """
        hint = (
            "patterns are shell-style ('*.bias', 'head.*'), a shared parameter has its first name, and the names begin "
            f"with {', '.join(names[:5])}"
        )
        for given, pattern in [(each, pattern) for each in self.rules for pattern in each.match]:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"the rule {given} takes no parameter by {pattern!r} that is trained; {hint}")
        free = list(names)
        for rule in self.rules:
            taken = [name for name in free if rule.takes(name, self._kind(name))]
            if not taken:
                kinds = ", ".join(sorted({self._kind(name) for name in names}))
                raise ValueError(
                    f"the rule {rule} takes no parameter that is trained and not taken by a rule before it; there are "
                    f"kinds {kinds}; {hint}"
                )
            if not isinstance(rule.method, Dense):
                free = [name for name in free if name not in taken]
