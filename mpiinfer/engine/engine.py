"""`Engine`: a model opened over the ranks of a communicator. The page to read first.

`Engine.open` is the way from a model's name to a running engine, one line a decision; `generate` is the way of a
prompt: text, request, schedule, plans, stages, samples, text. Both are collective: the same call on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from mpiinfer.comm.agree import on_all, on_first, same_on_all
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.launch import World, adopt, choose_device, launch
from mpiinfer.comm.waits import DEADLINE_WORDS
from mpiinfer.engine.generation import Answers
from mpiinfer.engine.inbox import Inbox, ListInbox, OnFinish
from mpiinfer.engine.memory import free_bytes, peak_rss_bytes
from mpiinfer.engine.prompts import Prompt, make_requests
from mpiinfer.engine.replica import Replica
from mpiinfer.engine.request import Output, Request, SamplingParams
from mpiinfer.engine.stats import RunStats
from mpiinfer.errors import AbortedError, DeadlineError, EngineError, LayoutError, MpiinferError, RequestError
from mpiinfer.layout.grid import make_grid
from mpiinfer.layout.mesh import Mesh, data_plane, open_mesh
from mpiinfer.layout.spec import Layout
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.stage import Stage
from mpiinfer.observe.log import LOGGER
from mpiinfer.plan.cost import layer_ranges
from mpiinfer.plan.fit import best_layout, resolve
from mpiinfer.text.tokenizer import Tokenizer
from mpiinfer.weights.checkpoint import Checkpoint, open_checkpoint
from mpiinfer.weights.choose import compute_dtype, new_weight
from mpiinfer.weights.load import LoadReport, load
from mpiinfer.weights.slices import shard_bytes
from mpiinfer.weights.source import resolve_model

if TYPE_CHECKING:
    from mpi4py import MPI

# Told (bytes so far, bytes in all) while this rank loads.
OnLoad = Callable[[int, int], None]


@dataclass(frozen=True)
class RankReport:
    """What one rank holds: its place, layers, bytes read and in memory, seconds of loading."""

    rank: int
    host: str
    replica: int
    stage: int
    shard: int
    layers: tuple[int, int]
    bytes_read: int
    shard_bytes_in_file: int
    weight_bytes: int
    peak_rss_bytes: int
    load_s: float


class Engine:
    """A loaded model. Use as a context manager, or call `close`; both are collective."""

    def __init__(
        self,
        *,
        model: str,
        checkpoint: Checkpoint,
        layout: Layout,
        world: World,
        close: Callable[[], None],
        mesh: Mesh,
        stage: Stage,
        tokenizer: Tokenizer | None,
        report: LoadReport,
        weights: str,
    ) -> None:
        """Assembled by `open`. close: frees what that made. tokenizer: on each replica's head, None elsewhere."""
        self.model = model
        self.config: ModelConfig = checkpoint.config
        self.layout = layout
        self.weights = weights
        self.reports: list[RankReport] = []
        self.stats: RunStats | None = None
        self._failure: str | None = None
        self._world = world
        self._close = close
        self._mesh = mesh
        self._stage = stage
        self._tokenizer = tokenizer
        self._eos_token_ids = self.config.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
        self.cache_tokens = self._agree_on_cache()
        self._replica = Replica(layout, mesh, stage, self.cache_tokens // layout.block_tokens)
        self.reports = mesh.model.gather_object(self._rank_report(report), idle=True)

    @classmethod
    def open(
        cls,
        model: str,
        *,
        layout: Layout | None = None,
        comm: MPI.Comm | Domain | World | None = None,
        weights: str = "exact",
        on_load: OnLoad | None = None,
    ) -> Engine:
        """Load `model` over all ranks of `comm` (default: the world). Collective.

        model: a card's name, a Hugging Face folder, or a .gguf file. layout: default, the best one for these ranks.
        comm: a communicator that stays the caller's. Without one the program is taken to be all inference: MPI is
        started, threads are set to the rank's share of its cores, and an uncaught exception ends every rank.
        weights: how they are held: "exact" (fp32 on CPUs, as in the files on GPUs), "fp32", "bf16", "fp16", "int8",
        "int4", "native" (as in the files) or "auto" (the fastest within 1 % of fp32's perplexity).
        on_load: told of this rank's progress.

        Raises the same MpiinferError on every rank when the model or the layout is at fault.
        """
        world = comm if isinstance(comm, World) else launch() if comm is None else adopt(comm)
        domain = world.domain
        undo = contextlib.ExitStack()
        if world is not comm:
            undo.callback(world.close)
        try:
            checkpoint = on_all(domain, lambda: open_checkpoint(resolve_model(model)))
            config = checkpoint.config
            layout = on_all(domain, lambda: resolve(layout or best_layout(config, world.nodes), config))
            same_on_all(domain, {"layout": layout, "config": config, "weights": checkpoint.digest()}, _differs)
            domain.waits.deadline_s = layout.deadline_s
            device = choose_device(world, layout.device)
            dtype = on_all(domain, lambda: compute_dtype(weights, config.dtype, device))
            on_all(domain, checkpoint.check)
            grid = on_all(domain, lambda: make_grid(layout, world.nodes))
            mesh = undo.enter_context(open_mesh(domain, grid, data_plane(layout.device, device, world.network)))
            layers = layer_ranges(_counts(layout))[mesh.place.stage]
            allocate = partial(new_weight, choice=weights, index=checkpoint.index, dtype=dtype, device=device)
            stage = on_all(domain, lambda: Stage(config, layers, mesh.tp, dtype, device, allocate))
            report = on_all(domain, lambda: _load(checkpoint, stage, on_load))
            tokenizer = on_all(domain, lambda: _tokenizer(checkpoint) if mesh.replica.is_first else None)
        except MpiinferError:  # every rank has it, or has heard of it: closing waits for nobody who is not coming
            undo.close()
            raise
        return cls(
            model=model,
            checkpoint=checkpoint,
            layout=layout,
            world=world,
            close=undo.close,
            mesh=mesh,
            stage=stage,
            tokenizer=tokenizer,
            report=report,
            weights=stage.weight_formats,
        )

    @property
    def device(self) -> str:
        """Where this rank computes: "cpu" or "cuda"."""
        return self._stage.device.type

    @property
    def is_first(self) -> bool:
        """Whether results arrive on this rank."""
        return self._mesh.model.is_first

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ids: Sequence[str] | None = None,
        on_finish: OnFinish | None = None,
        concurrency: int | None = None,
        arrivals_s: Sequence[float] | None = None,
    ) -> list[Output]:
        """Answer all prompts, run together in micro-batches. Collective; the first rank's arguments count.

        prompts: texts, lists of token ids, or lists of chat messages. sampling: one for all, or one each.
        on_finish: told of each output on the first rank, when it is finished. concurrency: how many prompts run at
        once at most (default: as many as the cache holds). arrivals_s: seconds from now at which each prompt may begin,
        ascending.

        Returns the outputs in the order of the prompts on the first rank, an empty list on the others; the first
        rank's `stats` say what the run cost. A prompt that the model cannot take gets an output with an `error`. Raises
        RequestError on every rank where that is so of all prompts, and EngineError where a rank failed.
        """
        self._check_alive()
        try:
            inbox: ListInbox | None = None

            def take_in() -> None:
                nonlocal inbox
                requests, refused = self._requests(prompts, sampling, ids)
                inbox = ListInbox(requests, arrivals_s, on_finish)
                for output in refused:
                    inbox.deliver(output)

            on_first(self._mesh.model, take_in)
            self._run(inbox, concurrency)
            return sorted(inbox.outputs, key=lambda output: output.index) if inbox else []
        except RequestError:  # on every rank, before anything ran
            raise
        except BaseException as error:
            self._fail(error)

    def run(self, inbox: Inbox | None = None, *, concurrency: int | None = None) -> None:
        """Answer requests as they come, until `inbox` (given on the first rank) is closed. Collective.

        While there are none, all ranks sleep. Raises EngineError where a rank failed.
        """
        self._check_alive()
        try:
            self._run(inbox, concurrency)
        except BaseException as error:
            self._fail(error)

    def request(self, index: int, prompt: Prompt, sampling: SamplingParams | None = None) -> Request:
        """A request for an inbox: checked and tokenised, on the first rank. May be called from any thread.

        Raises RequestError for one that the model cannot take.
        """
        request = self._requests([prompt], sampling, None)[0][0]
        return msgspec.structs.replace(request, index=index, id=str(index))

    def close(self) -> None:
        """Free the domains and what `open` made of the communicator. Collective."""
        self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:  # after a failure the ranks no longer meet in a collective close
            self.close()

    # ---- inside

    def _check_alive(self) -> None:
        """After a failure the ranks no longer agree on what has run: nothing may run on top of that."""
        cause = self._failure or self._world.domain.waits.abort.poll()
        if cause is not None:
            raise EngineError(f"this engine has failed and cannot be used any more: {cause}")

    def _run(self, inbox: Inbox | None, concurrency: int | None) -> None:
        """Answer what comes through `inbox`, given on the first rank."""
        gathered = self._mesh.model.gather_object(self._replica.run(inbox, self._begin, concurrency), idle=True)
        if gathered:
            of_requests = tuple(one for _, of_head in gathered for one in of_head)
            self.stats = RunStats(tuple(rank for rank, _ in gathered), of_requests)

    def _begin(self, request: Request) -> Answers:
        assert self._tokenizer is not None
        return Answers(request, self._tokenizer, self._eos_token_ids, self.config.max_positions)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        ids: Sequence[str] | None,
    ) -> tuple[list[Request], list[Output]]:
        assert self._tokenizer is not None
        params = sampling or SamplingParams()
        return make_requests(prompts, params, ids, self._tokenizer, self.config, self.cache_tokens)

    def _agree_on_cache(self) -> int:
        """Tokens of cache: the smallest of what the ranks have room for, the same on every rank of the model."""
        free = free_bytes(self._stage.device)
        if self._stage.device.type == "cpu":  # shared with the other ranks of the node; a GPU is this rank's own
            free //= self._world.num_local
        block = self.layout.block_tokens
        tokens = self.layout.cache_bytes(free) // (self._stage.cache_bytes_per_token * block) * block
        model = self._mesh.model
        everyone = model.gather_object(tokens, idle=True)
        return on_first(model, lambda: min(everyone))

    def _rank_report(self, report: LoadReport) -> RankReport:
        place, stage = self._mesh.place, self._stage
        rank = self._world.domain.rank
        return RankReport(
            rank=rank,
            host=self._world.hosts[rank],
            replica=place.replica,
            stage=place.stage,
            shard=place.shard,
            layers=(stage.layers.start, stage.layers.stop),
            bytes_read=report.bytes_read,
            shard_bytes_in_file=report.shard_bytes_in_file,
            weight_bytes=stage.num_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            load_s=report.seconds,
        )

    def _fail(self, error: BaseException) -> NoReturn:
        """This rank cannot go on: say why in one line, and see that no other rank waits for it."""
        place = self._mesh.place
        rank = self._world.domain.rank
        label = f"[rank {rank}, model {Path(self.model).name}, stage {place.stage}, step {self._replica.step}]"
        if isinstance(error, AbortedError):
            self._failure = str(error)
            if DEADLINE_WORDS in self._failure:
                LOGGER.error("%s was in: %s", label, self._last_actions())
            raise error
        cause = self._failure = f"{label} {type(error).__name__}: {error}"
        if isinstance(error, DeadlineError):
            LOGGER.error("%s was in: %s", label, self._last_actions())
        LOGGER.debug("%s", cause, exc_info=error)
        self._world.domain.waits.abort.post(cause)
        if not isinstance(error, Exception):  # an interrupt stays one
            raise error
        raise EngineError(cause) from error

    def _last_actions(self) -> str:
        return ", ".join(f"{domain!r} {domain.accounts.last_action}" for domain in self._mesh.domains)


def _differs(values: list[dict[str, Any]]) -> LayoutError:
    """Names the first rank that sees something else than rank 0, and what."""
    rank = next(rank for rank, value in enumerate(values) if value != values[0])
    what = next(name for name in values[0] if values[rank][name] != values[0][name])
    return LayoutError(f"rank {rank} sees another {what} than rank 0: give every rank the same arguments and files")


def _counts(layout: Layout) -> tuple[int, ...]:
    assert layout.stages != "balanced"
    return layout.stages


def _load(checkpoint: Checkpoint, stage: Stage, on_load: OnLoad | None) -> LoadReport:
    total = shard_bytes(stage.manifest, checkpoint.index)
    done = 0

    def progress(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_load is not None:
            on_load(done, total)

    return load(checkpoint, stage.manifest, stage.weights, progress)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.is_gguf:
        return Tokenizer.from_gguf(checkpoint.metadata, checkpoint.path)
    return Tokenizer.from_folder(checkpoint.path)
