"""Trains on streamed and packed text over 8 virtual devices, with the position in the text saved in checkpoints.

`spmd train` supports this as `[data] kind = "text"` (docs/recipes.md). Here it is a class that you can change.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
mesh = Mesh(range(8), (8,), ("data",))
END = 256  # the token after each document; smaller tokens are bytes


class PackedText:
    """Batches of (tokens, next tokens), int64[batch, seq] each, from concatenated documents.

    `state_dict` is the position after the last batch that was yielded, so a restart neither repeats nor skips text.
    """

    def __init__(self, files: list[Path], batch: int, seq: int) -> None:
        self.files, self.batch, self.seq = files, batch, seq
        self.file, self.rest, self.resumes = 0, torch.zeros(0, dtype=torch.int64), False

    def state_dict(self) -> dict[str, object]:
        return {"file": self.file, "rest": self.rest}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.file, self.rest, self.resumes = int(state["file"]), torch.as_tensor(state["rest"]), True

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self.resumes:
            self.file, self.rest = 0, self.rest[:0]
        self.resumes = False
        needed = self.batch * self.seq
        while self.file < len(self.files) or len(self.rest) > needed:
            if len(self.rest) <= needed:
                document = torch.tensor([*self.files[self.file].read_bytes(), END])
                self.file, self.rest = self.file + 1, torch.cat([self.rest, document])
                continue
            window, self.rest = self.rest[: needed + 1], self.rest[needed:]
            yield window[:-1].view(self.batch, self.seq), window[1:].view(self.batch, self.seq)


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-c]*.py"))
batches = spmd.shard_loader(PackedText(files, batch=16, seq=64), mesh, ("data", None), feeds="batch")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(257, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 257)).to("jax")
spmd.shard_module(model, mesh, [("**", None)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@spmd.compile
def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


state = {"model": model, "optimizer": optimizer, "batches": batches}
source = iter(batches)
for step in range(1, 31):
    loss = train_step(*next(source))
    if step % 10 == 0:
        spmd.checkpoint.save("runs/streamed-text", step, state)
        print(f"step {step}: loss {loss.item():.3f}")

following, _ = next(source)
spmd.checkpoint.restore("runs/streamed-text", state)  # as a new process would
again, _ = next(iter(batches))
print("the batch after the checkpoint is the same:", torch.equal(again.cpu(), following.cpu()))
