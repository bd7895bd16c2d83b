"""Signals of a cluster to ranks that average in every step: all stop at the same batch, and nothing is lost."""

import importlib
import os
import signal
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_compress.strategies import rendezvous, signals
from lightning_compress.strategies.rendezvous import EVERY
from tests.conformance.training import ByStep, train
from tests.helpers.training import LATER, parameters, saving_on_exception

STEPS = 16


def until(make=ByStep, steps=STEPS, **options):
    return train("onebit", make, max_epochs=-1, max_steps=steps, **options)


class Arrives(Callback):
    """A signal comes to some ranks after a step."""

    def __init__(self, ranks, step, number=signal.SIGTERM):
        self.ranks, self.step, self.number = ranks, step, number

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), self.number)


def _terminated(folder, ranks, step):
    save = saving_on_exception(folder)
    notes = []
    arrived = Arrives(ranks, step)
    with pytest.raises(SIGTERMException):
        until(callbacks=[arrived, save, Notes(notes)], enable_checkpointing=True)
    _, again = until(resume=f"{folder}/stopped.ckpt")
    _, whole = until()
    return notes, parameters(again).equal(parameters(whole))


class Notes(Callback):
    """Where the run was cut short."""

    def __init__(self, notes):
        self.notes = notes

    def on_exception(self, trainer, *_):
        self.notes.append(trainer.global_step)


@pytest.mark.parametrize(("size", "ranks", "step"), [(2, (1,), 1), (2, (0, 1), 4), (3, (2,), 3), (3, (0, 1, 2), 8)])
def test_sigterm_ends_all_ranks_at_one_step_and_the_run_goes_on_exactly(pools, tmp_path, size, ranks, step):
    answers = pools[size].run(_terminated, str(tmp_path), ranks, step)
    stopped = answers[0][0]
    assert answers == [(stopped, True)] * size
    assert step < stopped[0] <= step + EVERY + 2


def _late():
    trainer, _ = until(steps=6, callbacks=[Arrives((1,), 6)])
    return trainer.global_step, trainer.received_sigterm


def test_a_signal_after_the_last_step_is_known_to_all_ranks(pools):
    assert pools[2].run(_late) == [(6, True)] * 2


def _counted():
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts:
        trainer, _ = until(callbacks=[begun := Begun(broadcasts)])
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    assert not {signals.LOOP, *signals.HANDLERS} & {*vars(loop), *vars(connector)}
    assert all(hasattr(connector, name) for name in signals.HANDLERS)
    return begun.broadcasts, begun.taken


class Begun(Callback):
    """How many broadcasts there were in the steps."""

    def __init__(self, watched):
        self.watched, self.broadcasts, self.taken = watched, 0, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.taken = trainer.strategy._rendezvous.signals.taken
        if trainer.global_step == 1:
            self.before = self.watched.call_count
        self.broadcasts = self.watched.call_count - getattr(self, "before", 0)


def test_no_step_waits_for_a_broadcast_and_lightning_gets_its_own_back(pools):
    """Fails where Lightning renames what is replaced."""
    assert pools[2].run(_counted) == [(0, True)] * 2


def _renamed():
    with mock.patch.object(signals, "LOOP", "_of_another_version"):
        trainer, _ = until(steps=3, callbacks=[begun := Begun(mock.Mock(call_count=0))])
    return begun.taken, trainer.global_step, signals.HANDLERS[0] in vars(trainer._signal_connector)


@LATER  # a broadcast that could have another name
def test_another_lightning_is_left_alone(pools):
    assert pools[2].run(_renamed) == [(False, 3, False)] * 2


class Fake:
    """A trainer and its parts, as far as signals look."""

    def __init__(self):
        self.received_sigterm = False
        self._signal_connector = self
        self.fit_loop = self.epoch_loop = self.strategy = self
        self.epoch_progress = self.batch_progress = self.current = self
        self.processed = self.started = self.ready = 0
        self.should_stop = False
        self.launcher = None
        self._broadcast_sigterm_tensor = self._sigterm_notifier_fn = self._slurm_sigusr_handler_fn = print


def _asks(device=None):
    asked = []
    all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda *a, **k: asked.append(1) or all_reduce(*a, **k)):
        fake = Fake()
        interrupted = rendezvous.Rendezvous.everywhere(fake, device)
        found = []
        for batch in range(2 * EVERY + 2):
            if batch == EVERY - 1 and dist.get_rank():
                interrupted.signals._note_end(signal.SIGTERM, None)
            interrupted.next_batch()
            found.append(fake.received_sigterm)
    interrupted.close()
    return len(asked), found.index(True)


def test_one_question_in_four_batches_answered_a_batch_later(pools):
    assert pools[2].run(_asks) == [(3, EVERY + 1)] * 2


@pytest.mark.parametrize("together", [True, False])
def test_what_is_to_be_saved_is_saved_before_the_end(together):
    fake, done = Fake(), []
    fake.cluster_environment = None
    fake._slurm_sigusr_handler_fn = lambda *_: done.append(fake.received_sigterm)
    noted = signals.Signals(fake)
    noted.agreed(end=together, save=True)
    if not together:  # they meet again within the batch
        noted.agreed(end=True, save=False)
    assert not fake.received_sigterm
    noted.act()
    assert done == [False]
    assert fake.received_sigterm


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_clocks_of_either_package_are_only_read(package):
    timer = importlib.import_module(f"{package}.callbacks").Timer("00:00:00:01")
    fake = Fake()
    fake.callbacks = [timer]
    noted = signals.Signals(fake)
    noted.watch_clocks()
    assert signals.CLOCK in vars(timer)
    noted.release()
    assert signals.CLOCK not in vars(timer)


class Stream:
    """One of CUDA, on a CPU: what is copied without blocking is there when its event is waited for."""

    def __init__(self, device):
        self.waited = 0

    def record_event(self):
        return self

    def synchronize(self):
        self.waited += 1


def _asks_beside():
    streams, device = [], mock.Mock(type="cuda")
    zeros, copies = torch.zeros, []

    def stream(device):
        streams.append(Stream(device))
        return streams[0]

    def copy(self, other, non_blocking=False):
        copies.append(non_blocking)
        return copy_(self, other)

    copy_ = torch.Tensor.copy_
    with (
        mock.patch.object(rendezvous, "backend_of", return_value=""),  # as of the CPU, under NCCL
        mock.patch.object(torch.cuda, "Stream", stream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch, "zeros", lambda *sizes, dtype, device=None: zeros(*sizes, dtype=dtype)),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.Tensor, "copy_", copy),
    ):
        return *_asks(device), streams[0].waited, copies


def test_on_cuda_a_question_waits_for_an_event_a_batch_later_and_for_no_copy(pools):
    """Under NCCL; two copies to and from pinned memory beside the batches, none of which blocks."""
    assert pools[2].run(_asks_beside) == [(3, EVERY + 1, 3, [False, True, True] * 3)] * 2
