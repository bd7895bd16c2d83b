"""The model that all ranks have in common, in the place of a rank's own for as long as it is evaluated or saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_compress.strategies.waiting import WaitingMixin


class EvaluatedMixin(WaitingMixin):
    """Turns a ``DDPStrategy`` whose ranks train models of their own into one that evaluates and saves another one.

    A subclass says which (``evaluated``).

    Raises:
        ValueError: while a model is evaluated or saved, a buffer went, or took another shape.
    """

    _trainer: Any
    _fitting = False
    """A fit is under way."""
    _ended = False
    """It has left one model on all ranks."""
    _swa = False
    """SWA has put an average in the place of the rank's own: only the mean of these is worth anything."""
    _cached: Mapping[str, Tensor] | None = None
    _held: dict[str, Tensor] | None = None

    @abstractmethod
    def evaluated(self) -> Mapping[str, Tensor]:
        """Parameters and buffers of the model that is evaluated and saved, by name; others are the rank's own.

        It is asked at most once between two attempts, but in SWA's last epoch, on all ranks, and may communicate unless
        ``gives_up``.
        """

    def replica(self) -> dict[str, Tensor]:
        """This rank's own parameters and buffers by name, also while another model is evaluated."""
        return self._named() | (self._held or {})

    def _named(self) -> dict[str, Tensor]:
        assert self.lightning_module is not None
        return dict([*self.lightning_module.named_parameters(), *self.lightning_module.named_buffers()])

    def _shown(self) -> Mapping[str, Tensor]:
        """What differs from the rank's own, in the model that is evaluated."""
        if self._ended:
            return {}
        self._swa = self._swa or self._trainer.fit_loop._skip_backward  # in the epoch after SWA's last of training
        if self._cached is None or self._swa:
            with torch.inference_mode(False), torch.no_grad():  # what is made outlives the evaluation
                self._cached = self.evaluated()
        return self._cached

    def _swap_in(self) -> None:
        if self._fitting and self._held is None:
            named, other = self._named(), self._shown()
            self._held = {name: named[name].detach().clone() for name in other if name in named}
            self._put(other)

    def _swap_back(self) -> None:
        held, self._held = self._held, None
        self._put(held or {})

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into parameters and buffers of these names.

        Raises:
            ValueError: a buffer is gone, or of another shape; the others were copied.
        """
        named, changed = self._named() if tensors else {}, ""
        with torch.no_grad():
            for name, tensor in tensors.items():
                found = named.get(name)
                if found is not None and found.shape == tensor.shape:
                    found.copy_(tensor)
                else:
                    said = "is gone" if found is None else f"became one of shape {tuple(found.shape)}"
                    changed = f"the buffer {name!r} of shape {tuple(tensor.shape)} {said}"
        if changed:
            raise ValueError(
                f"{changed}, and models are swapped for evaluation; keep its shape, or keep it in a plain attribute"
            )

    def on_validation_end(self) -> None:
        """Go on with the rank's own."""
        self._swap_back()
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the model that is evaluated."""
        if not self._fitting or self._held is not None:
            return super().lightning_module_state_dict()
        named, other = self._named(), self._shown()
        own = {name: named[name].data for name in other}
        try:  # a user's state_dict may name, filter and convert as it likes
            for name, tensor in other.items():
                named[name].data = tensor.detach()
            return super().lightning_module_state_dict()
        finally:
            for name, tensor in own.items():
                named[name].data = tensor
