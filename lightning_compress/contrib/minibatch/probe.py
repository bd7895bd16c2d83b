"""Train on a few batches inside a fit, and leave no trace."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_compress.contrib.minibatch.trial import trial
from lightning_compress.engine.compression import Compression

_OURS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: parameters and buffers, which are kept otherwise, modules and hooks."""


def check_loader(trainer: Any) -> None:
    """Check that the training batches can be read a second time without a trace.

    Raises:
        ValueError: they do not come from one DataLoader over a dataset with indices, or ``training_step`` fetches them.
    """
    loader = trainer.train_dataloader
    fetched = type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if fetched or not plain or isinstance(loader.dataset, IterableDataset):
        what = "training_step(dataloader_iter)" if fetched else type(loader).__name__
        what += f" over {type(loader.dataset).__name__}" if plain and not fetched else ""
        raise ValueError(
            f"MinibatchSize reads the first batches of an epoch several times, which it cannot from {what}. Train from "
            "one torch.utils.data.DataLoader over a dataset with __getitem__, or remove MinibatchSize"
        )


class Probe:
    """The first batches of the epoch that is about to begin, to train on without a trace.

    The sampler is copied, and read from the present state of the random number generators. Callbacks and loggers see
    nothing of it; the module's own hooks of a step are called. A dataset that draws from a generator of its own, with
    ``num_workers=0``, draws on.

    Args:
        trainer: in a fit, before the first batch of an epoch; it passes ``check_loader``.
        module: what it trains.
        batches: how many, on each rank.

    Attributes:
        samples: rows of all batches, over all ranks.
        bytes_sent: by this rank, in all trainings so far; None if the strategy does not count them.
    """

    bytes_sent: int | None

    def __init__(self, trainer: Any, module: Any, batches: int) -> None:
        self._trainer, self._module = trainer, module
        loader = trainer.train_dataloader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        with isolate_rng():
            copied = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
            self._rows = list(islice(copied, batches))
        rows = sum(len(each) if isinstance(each, list | tuple) else 1 for each in self._rows)
        counted = torch.tensor(rows, dtype=torch.int64, device=module.device)
        self.samples = int(trainer.strategy.reduce(counted, reduce_op="sum"))
        self._compression = getattr(trainer.strategy, "_compression", None)
        self.bytes_sent = None if self._compression is None else 0

    def loss(self, accumulate: int, factor: float) -> float:
        """Train on the probe, undo it, and return the mean loss of its batches over the ranks. Collective.

        Each batch's loss is that before the step that it is part of.

        Args:
            accumulate: batches of a step.
            factor: of the learning rates.
        """
        trainer, device, compression = self._trainer, self._module.device, self._compression
        with untouched(trainer, self._module, compression):
            before = 0 if compression is None else compression.meter.bytes_sent
            trainer.accumulate_grad_batches = accumulate
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = group["lr"] * factor
            losses = torch.stack([loss.detach().to(device, torch.float32) for loss in self._steps()])
            if compression is not None:
                self.bytes_sent += compression.meter.bytes_sent - before
        return float(trainer.strategy.reduce(losses.mean(), reduce_op="mean"))

    def _steps(self) -> Iterator[Tensor]:
        """Take the steps as Lightning's loop does, and yield the loss of each batch."""
        trainer, module, loader = self._trainer, self._module, self._loader()
        loop = trainer.fit_loop.epoch_loop
        stepping = type(loop.automatic_optimization)(trainer)  # counts steps of its own
        for number, batch in enumerate(loader):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            loop.batch_progress.increment_ready()
            loop.batch_progress.is_last_batch = number + 1 == len(self._rows)
            trainer._logger_connector.on_batch_start(batch)
            _call(module, "on_train_batch_start", batch, number)
            arguments = loop._build_kwargs(OrderedDict(), batch, number)
            outputs = stepping.run(trainer.optimizers[0], number, arguments)
            _call(module, "on_train_batch_end", outputs, batch, number)
            if outputs:  # else training_step left the batch out
                yield outputs["loss"] * trainer.accumulate_grad_batches

    def _loader(self) -> DataLoader[Any]:
        loader = self._trainer.train_dataloader
        rows = {"batch_size": None, "sampler": self._rows}
        return DataLoader(
            loader.dataset,
            **rows if loader.batch_sampler is None else {"batch_sampler": self._rows},
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )


def _call(module: Any, hook: str, *arguments: Any) -> None:
    """Call a hook of the module as the Trainer does, which tells ``self.log`` where it is."""
    module._current_fx_name = hook
    getattr(module, hook)(*arguments)
    module._current_fx_name = "training_step"


@contextmanager
def untouched(trainer: Any, module: Any, compression: Compression | None) -> Iterator[None]:
    """Undo, at the end of the context, what training inside changed. Collective with a gradient compression.

    These are the model (parameters, buffers, gradients, and its modules' attributes: tensors, collections, and which
    objects they are, as metrics need it), optimizers, the loss scale, random number generators, Lightning's progress
    and results, and what the compression keeps. What other objects hold inside is not undone. Callbacks and loggers are
    not called inside. After an error inside, only callbacks and loggers are put back.

    Args:
        trainer: in a fit, before the first batch of an epoch.
        module: what it trains.
        compression: of its gradients, if there is one.
    """
    with ExitStack() as stack:
        stack.enter_context(isolate_rng())
        stack.enter_context(_loop(trainer))
        if compression is not None:
            stack.enter_context(trial(compression))
            compression.epoch = trainer.current_epoch  # as the strategy says before a batch
        for optimizer in trainer.optimizers:
            stack.enter_context(_optimizer(optimizer))
        stack.enter_context(_model(module))
        stack.enter_context(_precision(trainer.precision_plugin))
        yield


@contextmanager
def _loop(trainer: Any) -> Iterator[None]:
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    places = [
        (trainer, ("callbacks", "loggers", "accumulate_grad_batches")),
        (loop, ("batch_progress", "_results")),
        (connector, ("_first_loop_iter", "_current_fx")),
        (trainer.strategy, ("_clock",) if hasattr(trainer.strategy, "_clock") else ()),
    ]
    kept = [(holder, name, getattr(holder, name)) for holder, names in places for name in names]
    try:
        trainer.callbacks, trainer.loggers = [], [DummyLogger() for _ in trainer.loggers]
        loop.batch_progress, loop._results = type(loop.batch_progress)(), type(loop._results)(training=True)
        if hasattr(trainer.strategy, "_clock"):
            trainer.strategy._clock = type(trainer.strategy._clock)()
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)


@contextmanager
def _precision(plugin: Any) -> Iterator[None]:
    state = dict(plugin.state_dict())
    yield
    if state:
        plugin.load_state_dict(state)


@contextmanager
def _optimizer(optimizer: Optimizer) -> Iterator[None]:
    states = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
    groups = [
        {name: _copied(each) for name, each in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    yield
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


@contextmanager
def _model(module: nn.Module) -> Iterator[None]:
    parts = [_Part(each) for each in module.modules()]
    gradients = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in module.parameters()]
    yield
    for part in parts:
        part.restore()
    for parameter, gradient, numbers in gradients:
        if gradient is not None and numbers is not None:
            gradient.copy_(numbers)
        parameter.grad = gradient


class _Part:
    """What one module holds itself, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {name: each for name, each in vars(module).items() if name not in _OURS}
        self._copies = {name: _copied(each) for name, each in self._attributes.items() if not isinstance(each, Tensor)}
        self._buffers = dict(module._buffers)
        held = [*module._parameters.values(), *self._buffers.values(), *self._attributes.values()]
        tensors = [
            each for each in held if isinstance(each, Tensor) and 0 not in each.stride()
        ]  # expanded: not writable
        self._numbers = [(each, each.detach().clone()) for each in tensors]

    def restore(self) -> None:
        """Put everything back into the objects that held it."""
        attributes = vars(self._module)
        for name in attributes.keys() - self._attributes.keys() - _OURS:
            del attributes[name]
        attributes.update(self._attributes)
        for name, copy_of in self._copies.items():
            attributes[name] = _refilled(self._attributes[name], copy_of)
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        for tensor, numbers in self._numbers:  # DistributedDataParallel's broadcasts do not count as a new version
            tensor.detach().copy_(numbers)


def _refilled(value: Any, contents: Any) -> Any:
    """Return a collection with the contents of its copy; others may hold it, too."""
    if type(value) is list:
        value[:] = contents
    elif type(value) in (dict, set):
        value.clear()
        value.update(contents)
    return value


def _copied(value: Any) -> Any:
    """Return a copy of lists, sets, mappings and tensors, at any depth; of anything else the value itself."""
    if type(value) is Tensor:
        return value.detach().clone()
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(each) for each in value)
    return value
