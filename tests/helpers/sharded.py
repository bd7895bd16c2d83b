"""A character GPT of 111,104 parameters, sharded by ``fully_shard``: natively on two dimensions of a mesh, or by us."""

import gzip
import hashlib
from functools import cache
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from lightning_compress import attach

ROOT = Path(__file__).parents[2]
CAPTIONS = ROOT.parent / "shared/data/multi30k/train.en.gz"
LETTERS = 78


@cache
def text():
    """Numbers of the letters of Multi30k's captions; where these are not, of our own pages."""
    pages = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    read = gzip.decompress(CAPTIONS.read_bytes())[:1_000_000] if CAPTIONS.exists() else pages
    letters = sorted(set(read))
    places = torch.zeros(256, dtype=torch.long)
    places[letters] = torch.arange(len(letters)).clamp_(max=LETTERS - 1)
    return places[torch.frombuffer(bytearray(read), dtype=torch.uint8).long()]


class Block(nn.Module):
    def __init__(self, width, heads, recompute):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.recompute = heads, recompute

    def _forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.between(x))))

    def forward(self, x):
        if self.recompute:
            return torch.utils.checkpoint.checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


class GPT(nn.Module):
    def __init__(self, width=64, blocks=2, tied=False, recompute=False, spare=False):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4, recompute) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
        if tied:
            self.head.weight = self.letters.weight
        if spare:
            self.spare = nn.Linear(width, width)  # nothing uses it

    def forward(self, letters):
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MESHES = count()


def mesh_of(width=2):
    """A mesh of all ranks: replicas, of so many shards each.

    Its names are new, because DTensor keeps plans for meshes that are equal, and the groups of an earlier test's are
    gone.
    """
    number, sizes = next(MESHES), (dist.get_world_size() // width, width)
    return init_device_mesh("cpu", sizes, mesh_dim_names=(f"replicate{number}", f"shard{number}"))


def replicas(mesh):
    """The dimension of the replicas."""
    return mesh[mesh.mesh_dim_names[0]]


def shards(mesh):
    """The dimension of the shards."""
    return mesh[mesh.mesh_dim_names[1]]


def build(mesh, param=None, reduce=None, compiled=False, **model):
    """The model, sharded over a mesh block by block."""
    torch.manual_seed(0)
    made, policy = GPT(**model), MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for block in made.blocks:
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(made, mesh=mesh, mp_policy=policy)


def loss_of(model, number):
    """The loss of this rank's batch of such a number."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    starts = torch.randint(len(text()) - 17, (4, 1), generator=generator)
    batch = text()[starts + torch.arange(17)]
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model, optimizer, steps, accumulate=1, way="sharded", clip=None, first=0):
    """The losses of so many steps; this loop is the same for native HSDP and ours."""
    losses = []
    for step in range(first, first + steps):
        for number in range(accumulate):
            last = number == accumulate - 1
            if way == "sharded":
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_gradient_sync(last)
            loss = loss_of(model, step * accumulate + number) / accumulate
            loss.backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * accumulate)
    return losses


def whole(model, mesh):
    """All parameters, in one vector; collective."""
    own = [each.detach().to_local() for each in model.parameters()]
    group = mesh.get_group(1)
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return torch.cat([torch.cat(parts).float().flatten() for parts in zip(*gathered, strict=True)])


def fingerprint(model, mesh):
    """A hash of the whole model."""
    return hashlib.sha256(whole(model, mesh).numpy().tobytes()).hexdigest()[:12]


def native(mesh, steps, model, **training):
    """The hash and losses of PyTorch's own HSDP."""
    made = build(mesh, **model)
    losses = train(made, torch.optim.AdamW(made.parameters(), 3e-3), steps, **training)
    return fingerprint(made, mesh), losses


def ours(mesh, compressor, steps, model, settings=None, **training):
    """The hash and losses of replicas that we average, and what the compression says."""
    made = build(shards(mesh), **model)
    optimizer = torch.optim.AdamW(made.parameters(), 3e-3)
    compression = attach(made, compressor, optimizer=optimizer, replicas=replicas(mesh), **(settings or {}))
    losses = train(made, optimizer, steps, **training)
    compression.close()
    return fingerprint(made, mesh), losses, compression.stats()
