"""Average the chosen layers of one model by their sufficient factors, in each backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_compress.backward.sufficient_factors.decision import FactorSettings, choose, decide
from lightning_compress.backward.sufficient_factors.factored_layer import FactorPairs, Layer, Outermost, Way
from lightning_compress.backward.sufficient_factors.row_exchange import RowExchange, average_ordinary, flag_of
from lightning_compress.collectives import CountingCollective, TorchCollective, consensus
from lightning_compress.collectives.counting import Meter
from lightning_compress.collectives.torch import backend_of
from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.attach import announce
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import Background
from lightning_compress.planning.link import agreed

_IGNORED = "_ddp_params_and_buffers_to_ignore"


class Factors:
    """The layers of one model whose gradients travel as factors; made by ``enable``.

    In each synchronising backward, all ranks gather the rows of every layer in the same order. A layer is gathered as
    soon as backward has passed it (on CUDA at the end of backward), over its own process group, in a thread beside
    backward. Then the means are formed, in the order of the ranks. Rows of backwards that do not synchronise are kept.

    Args:
        module: the model.
        layers: the chosen ones.
        settings: what the user chose.
        ranks: how many average.

    Attributes:
        layers: in the order in which they are sent.
        sent: bytes that this rank sent for them in the last backward that synchronised.
        summary: one line that says how each layer travels, once that is decided.
    """

    def __init__(self, module: nn.Module, layers: list[Layer], settings: FactorSettings, ranks: int) -> None:
        self._module, self._settings, self._ranks = module, settings, ranks
        self.layers, self.sent, self.summary = layers, 0, ""
        self._task: int | None = None
        self._outermost = Outermost(self._clear, self._finish)
        self._syncs = self._expected = self._ordered = self._seen = False
        self._next = 0
        self._arrivals: list[str] = []
        self._problem: Exception | None = None
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []
        self._compression: Compression | None = None
        self._ddp: DistributedDataParallel | None = None
        self._before = list(getattr(module, _IGNORED, ()))
        self._leave()

    def __reduce__(self) -> tuple[type[_Idle], tuple[()]]:
        return _Idle, ()  # in a copy of the wrapped model, whose hook we are

    def _leave(self) -> None:
        """Make DistributedDataParallel ignore the parameters, but for one, which it needs."""
        names = {path for layer in self.layers for path in layer.paths}
        theirs = [
            parameter
            for path, parameter in self._module.named_parameters()
            if parameter.requires_grad and path not in names and path not in self._before
        ]
        if not theirs:
            biased = [layer for layer in self.layers if layer.bias is not None and layer.bias.requires_grad]
            if not biased:
                raise ValueError(
                    "sufficient factors would take every trained parameter, and DistributedDataParallel refuses a "
                    "model without any for itself. Exclude one layer: " + ", ".join(each.name for each in self.layers)
                )
            min(biased, key=lambda each: each.module.out_features).bias = None
        ours = [path for layer in self.layers for path in layer.paths]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._module, [*self._before, *ours])
        setattr(self._module, checks.AVERAGED_ELSEWHERE, ours)
        for layer in self.layers:
            layer.under_way = self._outermost.task
            layer.switch(on=True)

    def begin(
        self,
        ddp: DistributedDataParallel,
        compression: Compression | None = None,
        say: Callable[[str], object] = announce,
        at_forward: bool = True,
    ) -> None:
        """Average from now on. A collective call: all ranks get rank 0's weights, as DistributedDataParallel does it.

        Args:
            ddp: the wrapped model.
            compression: of its other parameters, from ``attach``. It counts our bytes too. None: stock DDP.
            say: shows a line, on rank 0.
            at_forward: ``no_sync`` around the forward decides whether its backward synchronises, as in a bare training
                loop; otherwise the one around the backward does.

        Raises:
            ValueError: ``ddp`` does not wrap the enabled model.
        """
        if not isinstance(ddp, DistributedDataParallel) or ddp.module is not self._module:
            raise ValueError("sufficient factors: begin() takes the DistributedDataParallel of the enabled model")
        whole = TorchCollective(ddp.process_group)
        self._device = self.layers[0].weight.device
        self._transport = whole.apart()
        self._meter = Meter(self._device)
        self._collective = CountingCollective(self._transport, self._meter)
        self._exchange = RowExchange(self._collective, self._device, self._settings.dtype == "bfloat16")
        self._background = Background()
        self._sent_before = 0
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        for parameter in (each for layer in self.layers for each in layer.parameters):
            whole.broadcast(parameter, self._device)
        self._ddp, self._compression, self._say, self._at_forward = ddp, compression, say, at_forward
        self._handles.append(ddp.register_forward_pre_hook(self._expect))
        self._watch()

    def _watch(self) -> None:
        """Call ``_arrive`` when backward has passed a parameter: after the node that would accumulate its gradient."""
        ours = {id(layer.weight): layer for layer in self.layers}
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes.append(node)  # otherwise torch makes another one
                self._handles.append(node.register_hook(partial(self._arrive, ours.get(id(parameter)))))

    def _expect(self, ddp: DistributedDataParallel, _: object) -> None:
        if torch.is_grad_enabled():
            self._expected = bool(ddp.require_backward_grad_sync)

    def _arrive(self, layer: Layer | None, _: object, given: tuple[Tensor | None, ...]) -> None:
        """Take the rows of a layer that backward has passed; ``layer`` is None for other parameters."""
        task = self._outermost.task()
        if task != self._task:
            self._begin_pass(task)
        if layer is None:
            return
        if layer.arrived:  # several checkpoints use it, or one and something outside
            layer.returns = True
            if layer in self.layers[: self._next]:
                self._problem = ValueError(
                    f"{layer.name} is used by several reentrant checkpoints, or by one and outside of it, which was "
                    f"not so at first; use checkpoint(..., use_reentrant=False), or exclude={[layer.name]!r}"
                )
        layer.arrived = True
        rows = layer.take(torch._C._current_graph_task_id())
        if layer.way == "ordinary":
            layer.local = True
            self._form_own(layer, rows)  # of a forward before the decision
            return
        if given[0] is not None:
            self._problem = ValueError(
                f"the weight of {layer.name} is used outside of its layer's forward, where its gradient is not a "
                f"product of rows. Exclude the layer (exclude={[layer.name]!r})"
            )
        # rows that wait for a backward that synchronises must not be views of memory that may change
        layer.rows += rows if self._syncs else [(inputs.clone(), gradients.clone()) for inputs, gradients in rows]
        self._arrivals.append(layer.name)
        if self._syncs and self._ordered and self._seen and self._stream is None:  # NCCL: buckets and rows in one order
            self._send_arrived()

    def _clear(self) -> None:
        """Drop rows that nobody took, because a backward raised."""
        for layer in self.layers:
            layer.drop_left()

    def _begin_pass(self, task: int) -> None:
        if self._task is not None:  # the one before raised, and what it sent may still be under way
            self._background.wait()
            self.forget()
        self._task, self._next, self._problem = task, 0, None
        self._arrivals = []
        assert self._ddp is not None
        self._syncs = self._expected if self._at_forward else bool(self._ddp.require_backward_grad_sync)
        for layer in self.layers:
            layer.look()
            layer.arrived, layer.counts, layer.gathered = False, None, None

    def _send_arrived(self, all_of_them: bool = False) -> None:
        """Gather the next layers in the order, as far as backward has passed them for the last time."""
        while self._next < len(self.layers):
            layer = self.layers[self._next]
            if not all_of_them and (layer.returns or not layer.arrived):
                return
            self._next += 1
            if layer.way != "ordinary":
                self._submit(layer)

    def _submit(self, layer: Layer) -> None:
        layer.done.clear()
        if self._stream:
            layer.marks = [torch.cuda.Event(), torch.cuda.Event()]
            layer.marks[0].record()
        self._background.submit(partial(self._gather, layer, layer.rows), layer.done.set)

    def _gather(self, layer: Layer, rows: FactorPairs) -> None:
        with errors.explained(f"gathering the factors of {layer.name}", self._transport.rank):
            if self._stream is None:
                self._exchange.run(layer, rows)
                return
            self._stream.wait_event(layer.marks[0])
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for each in (tensor for pair in rows for tensor in pair):
                    each.record_stream(self._stream)
                self._exchange.run(layer, rows)
                layer.marks[1].record(self._stream)

    def _finish(self, task: int) -> None:
        """Send what is left at the end of backward, and average after its other callbacks."""
        self._clear()
        if task != self._task:  # it came to no parameter
            return
        if not self._syncs:
            self._keep()
            return
        self._send_arrived(all_of_them=True)
        # averages by DistributedDataParallel, or by the compression's thread, come first: Gloo needs one order
        torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep rows until a backward synchronises."""
        self._task = None
        for layer in self.layers:
            if layer.rows:
                layer.keep()
        if self._problem:
            raise self._problem

    @torch.no_grad()
    def _average(self) -> None:
        """Leave the mean over the ranks in every layer's ``grad``."""
        for layer in self.layers:
            if layer.way != "ordinary":
                self._wait(layer)
        if new := [layer for layer in self.layers if layer.way is None and any(layer.counts or ())]:
            self._decide(new)
        flags, formed = [], [layer for layer in self.layers if layer.way == "factors"]
        for layer in formed:
            if layer.gathered is not None:
                flags += [flag_of(layer)] if self._compression and any(layer.counts or ()) else []
                layer.add(*layer.gathered, self._ranks)
            layer.rows, layer.gathered = [], None
        assert self._ddp is not None
        ordinary = [layer for layer in self.layers if layer.way == "ordinary"]
        alone = average_ordinary(ordinary, self._ddp, self._compression, self._collective, self._device)
        sent = int(self._meter.bytes_sent)
        self.sent, self._sent_before = sent - self._sent_before, sent
        if self._compression:
            dense = sum(layer.matrix_bytes(self._ranks) for layer in [*formed, *alone])
            flag = torch.stack(flags).sum() if flags else torch.zeros((), dtype=torch.float32, device=self._device)
            names = [name for layer in formed for name in layer.names]
            self._compression.count(self.sent, dense, flag, names)
        self._task, self._seen = None, True
        if self._problem:
            raise self._problem

    def _wait(self, layer: Layer) -> None:
        """Wait for the layer's exchange of this backward.

        Raises:
            ExchangeError: it failed, or one before it.
        """
        layer.done.wait()
        if layer.counts is None or (layer.way == "factors" and any(layer.counts) and layer.gathered is None):
            self._background.wait()
        if self._stream and layer.gathered:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(layer.marks[1])
            for each in layer.gathered:
                each.record_stream(current)

    def _decide(self, new: list[Layer]) -> None:
        """Decide how layers travel whose rows are known for the first time, the same on all ranks."""
        quiet = self._collective.uncounted
        said = decide(new, self._settings, quiet, self._exchange.sizes, self._device)
        self.summary = f"{self.summary}; {said}" if self.summary else said
        if quiet.rank == 0:
            self._say(f"lightning_compress: {said}")
        if not self._ordered:  # as rank 0's backward came to them
            seen = {name: place for place, name in enumerate(self._arrivals)}
            own = [float(seen.get(layer.name, len(seen))) for layer in self.layers]
            places = dict(zip(self.layers, agreed(own, quiet, self._device), strict=True))
            self.layers.sort(key=lambda layer: places[layer])
            self._ordered = True
        for layer in new:
            if layer.way == "factors":
                self._submit(layer)
                self._wait(layer)
            else:
                self._form_own(layer, layer.rows)
                layer.rows = []
                layer.switch(on=False)

    def _form_own(self, layer: Layer, rows: FactorPairs) -> None:
        """Leave this rank's own gradient in ``grad``, as autograd does."""
        layer.local = layer.local or bool(rows)
        for inputs, gradients in rows:
            layer.add(inputs, gradients, 1)

    def forget(self) -> None:
        """Drop what is left of a backward that raised, and rows of backwards before it that did not synchronise."""
        self._task = None
        for layer in self.layers:
            layer.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return how each layer travels, and in which order: primitives, the same on all ranks."""
        return {
            "ranks": self._ranks,
            "ways": {layer.name: layer.way for layer in self.layers if layer.way},
            "ordered": self._ordered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same number of ranks. Layers that it does not know are decided again."""
        ways = state.get("ways")
        if state.get("ranks") != self._ranks or not isinstance(ways, Mapping):
            return
        places = {name: place for place, name in enumerate(ways)}
        self.layers.sort(key=lambda layer: places.get(layer.name, len(places)))
        self._ordered = bool(state.get("ordered"))
        for layer in self.layers:
            way = ways.get(layer.name)
            if way in get_args(Way):
                layer.way = way
                layer.switch(on=way == "factors")

    def close(self) -> None:
        """Restore the model after training."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        for layer in self.layers:
            layer.switch(on=False)
            layer.forget()
            for parameter in layer.parameters:
                vars(parameter).pop("_ddp_ignored", None)
        vars(self._module).pop(checks.AVERAGED_ELSEWHERE, None)
        vars(self._module).pop(_IGNORED, None)
        if self._before:
            setattr(self._module, _IGNORED, self._before)
        if self._ddp is not None and self._background.idle:  # or a rank left in the middle of a step
            self._transport.close()
        self._ddp = self._compression = None


def enable(
    module: nn.Module, settings: FactorSettings | None = None, collective: TorchCollective | None = None
) -> Factors | None:
    """Take the weights of linear layers out of DistributedDataParallel, to average them by their factors.

    A collective call. Call it before the model is wrapped, and then ``begin`` with the wrapped model.

    Args:
        module: the model.
        settings: which layers, and how. None: the defaults.
        collective: the ranks that average. None: those of the default process group.

    Returns:
        the handle. None on one rank, where nothing is changed.

    Raises:
        ValueError: a layer cannot travel as factors, factors never pay at this number of ranks, or ranks chose
            differently. On every rank, before anything is changed.
    """
    settings = settings or FactorSettings()
    collective = collective or TorchCollective()
    problem, layers = None, []
    try:
        layers = choose(module, settings, collective.size)
    except ValueError as error:  # the other ranks wait for this one
        problem = error
    told = [(each.names, tuple(each.weight.shape), str(each.weight.dtype)) for each in layers]
    device = next(module.parameters()).device  # of one that is still to move, perhaps none on which the ranks talk
    device = device if backend_of(device.type, collective.group) else torch.device("cuda")
    advice = f"; rank {collective.rank} has {[each.name for each in layers]} by {settings}"
    said = {"layers or settings for sufficient factors": [settings, told]}
    consensus.check(said, problem, collective, device, advice)
    return Factors(module, layers, settings, collective.size) if collective.size > 1 else None


class _Idle:
    """What a copy of a wrapped model, or one from a file, has in place of the factors."""

    def _expect(self, *_: object) -> None:
        """Do nothing."""
