"""Trainings by several processes, which are started once and then forked: importing takes most of the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def train(request: dict[str, Any], rank: int) -> None:
    """One process of a training, as torchrun starts it."""
    from fitted import Silent, gradients_kept

    from narrowgauge.trainers import TrainSettings, fit
    from narrowgauge.trainers._parallel import processes

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["world"]),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"]),
    }  # fmt: skip
    said = {**request["settings"], **(request["other"] if rank else {})}
    settings = TrainSettings(**{**said, "data": Path(said["data"]), "out": Path(said["out"])})
    observer, looks = Silent(), []
    stops = request["stops"].get(str(rank))

    def stop() -> bool:
        looks.append(1)
        return stops is not None and len(looks) >= stops

    with processes(torch.device("cpu")) as device, gradients_kept() as gradients:
        outcome = fit(settings, device, observer, stop)
    torch.save(gradients, Path(request["answers"], f"{rank}.pt"))
    answer = {"outcome": outcome.__dict__, "told": observer.told, "initialized": dist.is_initialized()}
    Path(request["answers"], f"{rank}.json").write_text(json.dumps(answer))


def serve() -> None:
    """Read requests, a line of JSON each, and run them."""
    import fitted
    from transformers import CLIPModel, GPT2LMHeadModel

    from narrowgauge.trainers import fit

    assert all((fitted, CLIPModel, GPT2LMHeadModel, fit))
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for rank in range(request["world"]):
            child = os.fork()
            if child:
                children.append(child)
                continue
            status = 0
            try:
                train(request, rank)
            except BaseException:
                Path(request["answers"], f"{rank}.error").write_text(traceback.format_exc())
                status = 1
            os._exit(status)
        for child in children:
            os.waitpid(child, 0)
        print("done", flush=True)


class Trainings:
    """What starts them."""

    def __init__(self, cache: Path) -> None:
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __call__(
        self,
        settings: dict[str, Any],
        answers: Path,
        world: int = 2,
        stops: dict[int, int] | None = None,
        other: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run one, all but the first process with `other` settings; what each answered, or its error's text."""
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        answers.mkdir(parents=True)
        request = {
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()},
            "world": world, "port": port, "answers": str(answers), "stops": stops or {},
            "other": other or {},
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        found: list[Any] = []
        for rank in range(world):
            error = answers / f"{rank}.error"
            found.append(
                error.read_text() if error.exists() else json.loads((answers / f"{rank}.json").read_text())
            )
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


if __name__ == "__main__":
    serve()
