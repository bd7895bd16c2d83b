"""Ranks that train at their own pace within a bound: what every model is, who waits for whom, and what ends a wait."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from lightning_compress.collectives import TorchCollective
from lightning_compress.contrib.asynchronous import bounded_staleness
from lightning_compress.contrib.asynchronous.bounded_staleness import PAUSE, UPDATE, BoundedStaleness
from lightning_compress.contrib.asynchronous.links import GoneError, Links, Message
from lightning_compress.contrib.asynchronous.ssp import SSP
from tests.helpers.lives import live
from tests.helpers.training import digits

CPU = torch.device("cpu")
FEW = 30
FOUR_BITS = {"name": "rotated", "bits": 4}
TOPK = {"name": "topk", "density": 0.05}


def _net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _batches(rank):
    images, labels = digits().tensors
    draw = torch.Generator().manual_seed(rank)
    while True:
        picked = torch.randint(len(images), (16,), generator=draw)
        yield images[picked], labels[picked]


def _whole(model):
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def _loss(model):
    images, labels = digits().tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


class _Rank:
    """A rank of the pool with its model, optimizer and batches."""

    def __init__(self, settings, timeout=20.0, model=None, state=None):
        self.ranks, self.net = TorchCollective(), model or _net()
        self.optimizer, self.batches = _sgd(self.net), _batches(self.ranks.rank)
        named = dict(self.net.named_parameters())
        self.method = BoundedStaleness(named, settings, self.ranks.rank, self.ranks.size)
        if state is not None:
            self.load(state)
        others = [other for other in range(self.ranks.size) if other != self.ranks.rank]
        self.links = Links(self.ranks, others, self.method.answer, self.method.kinds, timeout, CPU)
        self.method.connect(self.links)

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        for _ in range(state["batches"]):
            next(self.batches)
        self.method.load_state_dict(state["method"])

    def step(self, pause=0.0):
        """Returns the change that the optimizer made, and when the step began and ended."""
        self.method.wait()
        began = time.monotonic()
        images, labels = next(self.batches)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(images), labels).backward()
        time.sleep(pause)
        self.method.begin()
        self.method.begin()  # a closure that is called twice
        before = _whole(self.net)
        self.optimizer.step()
        change, ended = _whole(self.net) - before, time.monotonic()
        self.method.end()
        return change, began, ended

    def meet(self):
        self.method.pause()
        self.method.agree(self.ranks)

    def close(self):
        self.method.close()
        self.links.close()


def _synchronous(size):
    """Models after each step of one process in which all ranks' changes are averaged."""
    shared, models, path = _net(), [_net() for _ in range(size)], []
    optimizers, batches = [_sgd(each) for each in models], [_batches(rank) for rank in range(size)]
    for _ in range(FEW):
        before, total = _whole(shared), 0.0
        for model, optimizer, (images, labels) in zip(models, optimizers, map(next, batches), strict=True):
            nn.utils.vector_to_parameters(before.clone(), model.parameters())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            total = total + (_whole(model) - before).double()
        nn.utils.vector_to_parameters((before + total / size).float(), shared.parameters())
        path.append(_whole(shared))
    return path


def _path(compressor):
    each, path = _Rank(SSP(0, compressor)), []
    for _ in range(FEW):
        each.step()
        each.method.wait()
        path.append(_whole(each.net))
    each.method.pause()
    path.append(_whole(each.net))
    each.close()
    return path


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_staleness_it_is_the_synchronous_average(pools, size):
    paths = pools[size].run(_path, "none")
    for number, wanted in enumerate(_synchronous(size)):
        assert (paths[0][number] - wanted).abs().max() <= 1e-6
    assert (paths[0][FEW - 1] - _whole(_net())).abs().max() > 0.1  # it did train
    for path in paths[1:]:
        assert all(own.equal(other) for own, other in zip(path, paths[0], strict=True))


@pytest.mark.parametrize("compressor", ["qsgd", TOPK], ids=str)
def test_without_staleness_models_are_bit_equal(pools, compressor):
    first, *others = pools[3].run(_path, compressor)
    for path in others:
        assert all(own.equal(other) for own, other in zip(path, first, strict=True))


def _paced(staleness, steps, slow, pause):
    """When steps began and ended, with a rank that is slow in some of its steps."""
    each, times, held = _Rank(SSP(staleness)), [], 0
    for step in range(steps):
        late = each.ranks.rank == slow and step % 5 == 4
        times.append(each.step(pause if late else 0.0)[1:])
        mine = [rank for clock, rank, _ in each.method._held if clock >= step]
        held = max(held, *(mine.count(rank) for rank in range(each.ranks.size)))
    each.meet()
    method = each.method
    each.close()
    return times, dict(method.leads), dict(method.waits), held, method.clock


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_rank_is_further_ahead_than_the_bound(pools, staleness):
    found = pools[3].run(_paced, staleness, 20, 1, 0.2)
    for rank, (times, leads, _, held, clock) in enumerate(found):
        assert sum(leads.values()) == clock == 20
        assert max(leads) <= staleness
        assert held <= 2
        for other, (theirs, *_) in enumerate(found):
            for step in range(staleness + 1, 20) if other != rank else ():
                assert theirs[step - staleness - 1][1] <= times[step][0]
    for _, leads, waits, *_ in (found[0], found[2]):  # they run ahead as far as they may, and wait for the slow one
        assert leads.get(staleness)
        assert waits[1] >= 1


def _conserved(settings, pauses, seed):
    """How far each model at a meeting is from the first one plus what was sent; and ranks from each other."""
    each, draw = _Rank(settings), torch.Generator().manual_seed(seed + TorchCollective().rank)
    start, changed, off = _whole(each.net), torch.zeros(_whole(each.net).numel(), dtype=torch.float64), []
    for steps in pauses[each.ranks.rank]:
        for _ in range(steps):
            changed += each.step(0.01 * float(torch.rand((), generator=draw)))[0]
        each.method.pause()
        each.method.pause()  # does nothing
        residual = each.method.state_dict()["residual"]
        kept = torch.cat([residual[name].reshape(-1) for name, _ in each.net.named_parameters()]).double()
        sent = changed - kept
        each.ranks.all_reduce(sent)
        off.append(float((start + sent / each.ranks.size - _whole(each.net)).abs().max()))
        each.method.agree(each.ranks)
        off.append(float((start + sent / each.ranks.size - _whole(each.net)).abs().max()))
        each.method.resume()
    moved = float((_whole(each.net) - start).abs().max())
    each.close()
    return off, moved, _whole(each.net), each.method.clock, float(kept.abs().max())


RULED = SSP(2, "onebit", rules=[{"match": ["1.*"], "compressor": "topk"}], min_numel=100)


@pytest.mark.parametrize(
    ("settings", "feeds"),
    [(SSP(0, "onebit"), True), (SSP(3, TOPK), True), (RULED, True), (SSP(2, "qsgd"), False), (SSP(2), False)],
    ids=["onebit", "topk", "rules", "qsgd", "none"],
)
def test_at_a_meeting_every_model_has_all_that_was_sent(pools, settings, feeds):
    pauses = [(8, 3, 0, 10), (12, 1, 4, 10), (8, 9, 1, 3)]  # ranks with different numbers of batches
    found = pools[3].run(_conserved, settings, pauses, 5)
    lossy = settings.compressor == "qsgd"  # and nothing is fed back
    for off, moved, model, clock, kept in found:
        assert moved > 0.1
        assert lossy or max(off) <= 1e-5
        assert model.equal(found[0][2])
        assert clock == 12 + 9 + 4 + 10
        assert (kept > 0) == feeds


def _meetings():
    """Many meetings, of which one rank leaves late."""
    each = _Rank(SSP(1))
    for number in range(20):
        for _ in range((number + each.ranks.rank) % 3):
            each.step()
        each.method.pause()
        if each.ranks.rank == number % 3:
            time.sleep(0.02)  # others go on, and may already be at the next meeting
        before = _whole(each.net)
        time.sleep(0.01)
        assert before.equal(_whole(each.net))
        each.method.resume()
    each.meet()
    each.close()
    return _whole(each.net), each.method.clock


def test_ranks_leave_a_meeting_at_different_times(pools):
    found = pools[3].run(_meetings)
    for model, clock in found:
        assert model.equal(found[0][0])
        assert clock == 2 * 20


def _update(rank, clock, by):
    """What a rank of three sends of a step in which its only parameter grew by so much."""
    parameter = torch.zeros(5)
    sender = BoundedStaleness({"a": parameter}, SSP(3), rank, 3)
    sender.begin()
    parameter += by
    sender.end()
    return Message(UPDATE, clock, 0.0, sender._held[0][2])


def test_what_comes_from_behind_a_meeting_waits_until_it_is_over():
    parameter = torch.zeros(5)
    method = BoundedStaleness({"a": parameter}, SSP(3), 0, 3)
    method.answer(1, _update(1, 0, 3.0))
    met = threading.Thread(target=method.pause)
    met.start()
    while not method.paused:
        time.sleep(0.01)
    method.answer(1, Message(PAUSE, 1, 0.0, torch.empty(0)))
    method.answer(2, _update(2, 0, 6.0))
    method.answer(1, _update(1, 2, 12.0))  # it has left already: rank 2 has paused, as it knows and this rank does not
    method.answer(2, _update(2, 1, 24.0))
    method.answer(2, Message(PAUSE, 2, 0.0, torch.empty(0)))
    met.join()
    assert parameter.tolist() == [3 / 3 + 6 / 3 + 24 / 3] * 5
    assert method.clock == 2
    method.resume()
    method.wait()
    assert parameter.tolist() == [(3 + 6 + 24 + 12) / 3] * 5


def _trained(compressor, staleness, steps):
    each = _Rank(SSP(staleness, compressor, min_numel=100))
    draw = torch.Generator().manual_seed(each.ranks.rank)
    for _ in range(steps):
        each.step(0.004 * float(torch.rand((), generator=draw)))
    each.meet()
    sent = sum(each.links.sent.values())
    each.close()
    return _loss(each.net), sent


@pytest.fixture(scope="module")
def dense(pools):
    """The loss in float32, and the bytes."""
    return pools[3].run(_trained, "none", 2, 100)[0]


@pytest.mark.parametrize("compressor", ["onebit", FOUR_BITS, "qsgd", TOPK], ids=str)
def test_codecs_train_as_float32_does(pools, dense, compressor):
    loss, whole = dense
    assert loss < 0.5
    reached, sent = pools[3].run(_trained, compressor, 2, 100)[0]
    assert reached < loss + 0.25  # of 2.3 at first; how stale updates are differs from run to run
    assert sent < whole / 2


def _resumed(compressor):
    """Models of a run, and of one that stops in its middle and goes on from what it has saved."""
    settings, found = SSP(0, compressor, min_numel=100), []
    state = None
    for steps in ((10, 10), (10,), (10,)):
        each = _Rank(settings, state=state)
        for count in steps:
            for _ in range(count):
                each.step()
            each.meet()
            each.method.resume()
        state = {"net": each.net.state_dict(), "optimizer": each.optimizer.state_dict(), "batches": 10}
        state["method"] = each.method.state_dict()
        if steps == (10, 10):
            state = None
        each.close()
        found.append((_whole(each.net), each.method.clock))
    (whole, clock), _, (parts, counted) = found
    return whole.equal(parts), clock, counted


@pytest.mark.parametrize("compressor", ["onebit", "qsgd"])
def test_a_run_goes_on_from_its_state(pools, compressor):
    assert pools[2].run(_resumed, compressor) == [(True, 20, 20)] * 2


def test_a_state_of_another_model_is_refused():
    saved = BoundedStaleness({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, SSP(), 0, 2).state_dict()
    for other in ({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(4)}):
        with pytest.raises(ValueError, match="another 'b' than the model"):
            BoundedStaleness(other, SSP(), 0, 2).load_state_dict(saved)


# what ends a wait


def _said(each, function):
    """What an error says, once this rank has told the others of it."""
    try:
        function()
    except (GoneError, FloatingPointError) as error:
        each.links.close(error)
        each.method.close()
        return str(error)
    return ""


def _for_ever(each):
    while True:
        each.step()


def _unlike(settings, model):
    """With the settings and the model of rank 1 given, on it alone."""
    one = TorchCollective().rank == 1
    each = _Rank(settings if one else SSP(), model=model() if one and model else None)
    return _said(each, lambda: _for_ever(each))


def _another_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("settings", "model"),
    [(SSP(), _another_net), (SSP(3), None), (SSP(4, "qsgd"), None), (SSP(4, seed=1), None)],
    ids=["model", "staleness", "compressor", "seed"],
)
def test_another_model_or_other_settings_are_an_error(pools, settings, model):
    for said in pools[3].run(_unlike, settings, model):
        assert "trains another model than rank" in said
        assert "or has other settings of bounded staleness; start all ranks with the same script" in said


def _other_states():
    each = _Rank(SSP(2))
    each.method.load_state_dict(each.method.state_dict() | {"clock": 10 * each.ranks.rank})
    return _said(each, lambda: _for_ever(each))


def test_another_saved_state_is_an_error(pools):
    for said in pools[2].run(_other_states):
        wanted = r"rank 0 is at step [0-3], and rank 1 has had its first 10 steps; resume all ranks from the same"
        assert re.search(wanted, said)  # rank 0 may have gone on for as long as it need not wait


def _not_finite():
    each = _Rank(SSP(1))

    def train():
        for _ in range(3):
            each.step()
        if each.ranks.rank == 0:
            each.optimizer.param_groups[0]["lr"] = float("inf")
        _for_ever(each)

    return _said(each, train)


def test_a_change_that_is_not_finite_is_an_error_on_all_ranks(pools):
    for said in pools[3].run(_not_finite):
        assert "the change of step 3 is not finite, and was not sent to other ranks; lower the learning rate" in said


def _left():
    each = _Rank(SSP(1))
    for _ in range(3):
        each.step()
    if each.ranks.rank == 1:
        each.close()
        return ""
    return _said(each, each.method.pause if each.ranks.rank else lambda: _for_ever(each))


def test_a_rank_that_leaves_without_a_meeting_is_named(pools):
    for said in pools[3].run(_left)[::2]:
        assert "rank 1 has left" in said  # as this rank noticed, or another one, which could not go on


def _checked():
    each, wanted = _Rank(SSP(0)), []
    each.step()

    def check():
        wanted.append(1)
        if len(wanted) > 3:
            raise KeyboardInterrupt

    if each.ranks.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            each.method.pause(check)
    each.ranks.all_reduce(torch.zeros(1))
    if each.ranks.rank == 1:
        each.method.pause()
    each.close()
    return len(wanted)


def test_a_caller_may_end_a_wait(pools):
    assert pools[2].run(_checked) == [4, 0]


def _vanishing(folder, how):
    """Rank 1 is killed, or stopped for ever, while the others wait for its clock, or for it to pause."""
    each = _Rank(SSP(2), timeout=1.0 if how == signal.SIGSTOP else 60.0)
    bounded_staleness.PING_S = 0.2
    for _ in range(5):
        each.step()
    each.ranks.all_reduce(torch.tensor([1.0]))
    if each.ranks.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        threading.Timer(0.5, lambda: os.kill(os.getpid(), how)).start()
        time.sleep(100)
    try:
        said = _said(each, each.method.pause if each.ranks.rank == 2 else lambda: _for_ever(each))
    finally:
        (folder / f"said{each.ranks.rank}").write_text(said)
        if how == signal.SIGSTOP and each.ranks.rank == 0:
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [(signal.SIGKILL, "rank 1 died: "), (signal.SIGSTOP, "rank 1 does not answer within 1 s: it hangs")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_gone_ends_the_wait_of_others(tmp_path, how, wanted):
    codes, _ = live(3, tmp_path / "ranks", _vanishing, tmp_path, how)
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert (tmp_path / f"said{rank}").read_text().startswith(wanted)


# settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"staleness": -1}, "staleness=-1 must be an integer, 0 or more.* 0 waits for all ranks"),
        ({"staleness": 2.0}, "staleness=2.0 must be an integer"),
        ({"staleness": True}, "staleness=True must be an integer"),
        ({"compressor": "powersgd"}, "compressor='powersgd' needs all ranks at the same step.*Use a codec"),
        ({"rules": [{"match": "a", "compressor": "powersgd"}]}, "compressor='powersgd' needs all ranks"),
        ({"compressor": "auto"}, "Name a codec, such as 'qsgd', or 'none'"),
        ({"compressor": "dgc"}, "compressor='dgc' does a part of the optimizer's work.*Use a codec"),
        ({"compressor": "signsgd"}, "compressor='signsgd' sends votes.*Use 'efsign' or 'onebit'"),
        ({"compressor": "nothing"}, "nothing"),
        ({"error_feedback": "loco"}, "error_feedback='loco' must be true, false or null"),
        ({"seed": -1}, "seed=-1 must be an integer, 0 or more"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SSP(**settings)


def test_parameters_that_cannot_be_moved_are_refused():
    for wrong in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match=f"parameter 'a' is {wrong.dtype} on {wrong.device}, and"):
            BoundedStaleness({"a": wrong}, SSP(), 0, 2)
    with pytest.raises(ValueError, match="takes no parameter by 'b'"):
        BoundedStaleness({"a": torch.zeros(3)}, SSP(rules=[{"match": "b", "compressor": "topk"}]), 0, 2)


def test_a_rank_alone_trains_as_its_optimizer_does():
    model, twin = _net(), _net()
    method, batches = BoundedStaleness(dict(model.named_parameters()), SSP(), 0, 1), _batches(0)
    for optimizer in (ours := _sgd(model), plain := _sgd(twin)):
        optimizer.zero_grad()
    for _ in range(5):
        method.wait()
        images, labels = next(batches)
        for net, optimizer in ((model, ours), (twin, plain)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
        method.end()  # without a step it does nothing
        method.begin()
        ours.step()
        method.end()
        plain.step()
    method.pause()
    method.close()
    assert (_whole(model) - _whole(twin)).abs().max() <= 1e-6
    assert method.clock == 5
