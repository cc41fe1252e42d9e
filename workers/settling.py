"""The thread that ends jobs: postprocess, store, tell. It settles one batch while the device runs the next."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from broker import BadMessage, Broker, BrokerUnavailable, JobStatus, Progress, SettleAnswer, Settlement
from inference import RowError, gpu_memory_bytes
from telemetry.logs import LineWriter
from telemetry.metrics import WorkerMetrics, padding_ratio
from workers.backoff import persist
from workers.handover import Burials, Endings, Handover, RunBatch
from workers.jobs import Burial, Ending, Job, Served, failed, finished
from workers.lane import Lane
from workers.threads import Grace, core_thread
from workers.watch import StepWatch

log = logging.getLogger(__name__)

#: Seconds between two words on the progress of one job.
TELL_EVERY_S = 0.25


class Settler:
    """Takes what is to end from `work`, in order, and ends it, however long the broker is away."""

    def __init__(
        self,
        broker: Broker,
        work: Handover,
        metrics: WorkerMetrics,
        lines: LineWriter,
        ended: Callable[[Sequence[Ending]], None],
        buried: Callable[[Sequence[Burial]], None],
        watch: StepWatch,
    ) -> None:
        self._broker = broker
        self._work = work
        self._metrics = metrics
        self._lines = lines
        self._ended = ended
        self._buried = buried
        self._watch = watch
        #: How many batches this process has settled: the number of the last one, in the log lines.
        self._batches = 0
        self._giving_up = threading.Event()
        self._thread = core_thread("settler", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace: Grace) -> bool:
        """Settle what is there, then end. False when it could not within the grace."""
        self._work.end()
        ended = grace.join(self._thread)
        self._giving_up.set()
        return ended

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                self._end(item)
            except BrokerUnavailable:
                log.exception("The broker stayed away; these jobs come back when their lease has run out.")
            except Exception:
                log.exception("Settling failed; these jobs go to the dead letters.")
                self._bury(_rescued(item))

    def _end(self, item: RunBatch | Endings | Burials) -> None:
        match item:
            case RunBatch():
                self._settle_batch(item)
            case Endings():
                self._settle(item.lane, item.endings)
            case Burials():
                self._bury(item)

    def _settle_batch(self, batch: RunBatch) -> None:
        lane = batch.lane
        self._batches += 1
        begin = time.monotonic()
        with self._watch.step("finish", lane):
            outputs = lane.executor.finish(batch.inferred)
        postprocess_s = time.monotonic() - begin
        endings = []
        now = time.time()
        for row, output in zip(batch.rows, outputs, strict=True):
            row.job.outputs[row.index] = output
            row.job.rows_left -= 1
        for job in dict.fromkeys(row.job for row in batch.rows):
            job.infer_s += batch.infer_s
            job.postprocess_s += postprocess_s
            job.batch_size = max(job.batch_size, len(batch.rows))
            if job.rows_left == 0:
                endings.append(_finished(job, lane.served, now))
        if lane.kind.buries_failures:
            failures = [ending for ending in endings if ending.status is JobStatus.FAILED]
            endings = [ending for ending in endings if ending.status is not JobStatus.FAILED]
            if failures:
                self._bury(Burials(lane, [_burial(lane, ending) for ending in failures]))
        self._settle(lane, endings, self._batches)
        self._tell_progress(lane, [row.job for row in batch.rows if row.job.rows_left and row.job.message.recorded])
        self._report(batch, postprocess_s)

    def _tell_progress(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """News for readers, now and then, of jobs that are not done with this batch."""
        now = time.monotonic()
        told: list[Progress] = []
        for job in dict.fromkeys(jobs):
            if now >= job.tell_at and job.started_at is not None:
                job.tell_at = now + TELL_EVERY_S
                done, total = len(job.outputs) - job.rows_left, len(job.outputs)
                told.append(Progress(job.lease.tag, job.id, job.lease.attempt, job.started_at, done, total))
        if not told:
            return
        try:
            self._broker.progress(lane.queue, told)
        except BrokerUnavailable as error:
            log.debug("Progress could not be told.", extra={"cause": str(error)})

    def _bury(self, item: Burials) -> None:
        if not item.burials:
            return
        answers = self._store(item.lane, [burial.settlement for burial in item.burials])
        buried = [
            burial for burial, answer in zip(item.burials, answers, strict=True) if answer is SettleAnswer.SETTLED
        ]
        served = item.lane.served
        self._metrics.buried(served.model, len(buried))
        self._metrics.jobs_ended(
            served.model, served.version, statuses={JobStatus.FAILED: len(buried)}, latencies_s=(), queue_waits_s=()
        )
        self._buried(buried)
        for burial in buried:
            log.error(
                "A message went to the dead letters.",
                extra={
                    "job_id": burial.settlement.job_id or None,
                    "model": served.model,
                    "status": JobStatus.FAILED,
                    "error": burial.kind,
                    "reason": burial.error.reason,
                },
            )

    def _settle(self, lane: Lane, endings: Sequence[Ending], batch: int | None = None) -> None:
        """End these jobs, of this batch if of one; those that were still ours are told to logs, metrics and events."""
        if not endings:
            return
        answers = self._store(lane, [ending.settlement for ending in endings])
        settled = [
            # Revoked while it ran, it has ended as that.
            lane.revoked(ending.job) if answer is SettleAnswer.REVOKED and not ending.dropped else ending
            for ending, answer in zip(endings, answers, strict=True)
            if answer in (SettleAnswer.SETTLED, SettleAnswer.REVOKED)
        ]
        lost = sum(answer is SettleAnswer.LOST for answer in answers)
        if lost:
            log.warning("Leases were lost; these results were not stored.", extra={"count": lost, "queue": lane.queue})
            self._metrics.lost_leases(lane.served.model, lost)
        self._ended(settled)
        now = time.monotonic()
        self._metrics.jobs_ended(
            lane.served.model,
            lane.served.version,
            statuses=Counter(ending.status for ending in settled),
            latencies_s=[now - ending.job.queued for ending in settled],
            queue_waits_s=[ending.job.started - ending.job.queued for ending in settled if ending.job.started],
        )
        self._lines.write([_job_line(lane.served, ending, batch) for ending in settled])

    def _store(self, lane: Lane, settlements: Sequence[Settlement]) -> list[SettleAnswer]:
        answers = persist(
            lambda: self._broker.settle(lane.queue, settlements),
            self._giving_up,
            log,
            "The broker is away; results wait for it.",
        )
        lane.forget([settlement.tag for settlement in settlements])
        return answers

    def _report(self, batch: RunBatch, postprocess_s: float) -> None:
        served, rows = batch.lane.served, len(batch.rows)
        tokens = sum(row.encoded.tokens for row in batch.rows)
        first = batch.rows[0].job
        self._metrics.batch_done(
            served.model,
            served.version,
            preprocess_s=first.encode_s,
            inference_s=batch.infer_s,
            postprocess_s=postprocess_s,
            rows=rows,
            tokens=tokens,
            padded_tokens=batch.longest * rows,
            closed_by=batch.reason,
        )
        log.info(
            "Batch done.",
            extra={
                "model": served.model,
                "version": served.version,
                "batch": self._batches,
                "batch_size": rows,
                "batch_tokens": tokens,
                "padding_ratio": round(padding_ratio(tokens, batch.longest * rows), 4),
                "closed_by": batch.reason.value,
                "preprocess_ms": round(first.encode_s * 1e3, 3),
                "infer_ms": round(batch.infer_s * 1e3, 3),
                "postprocess_ms": round(postprocess_s * 1e3, 3),
                "gpu_memory_bytes": gpu_memory_bytes(),
            },
        )


def _burial(lane: Lane, ending: Ending) -> Burial:
    """A failure that nobody waits for, with the dead letters."""
    job, error = ending.job, ending.error
    assert error is not None
    caller = job.message.headers.get("parent_id")
    reason = f"what follows job {caller} could not be called: {error.type}: {error.message}"
    return lane.bury(job.lease, BadMessage(reason, job_id=job.id), error.type)


def _finished(job: Job, served: Served, now: float) -> Ending:
    """The job's ending; whatever is wrong with one job is no other's failure."""
    try:
        return finished(job, served, now)
    except Exception as error:
        log.exception("A job cannot be finished; it fails alone.", extra={"job_id": job.id})
        return failed(job, served, RowError.of(error, with_traceback=False), now)


def _rescued(item: RunBatch | Endings | Burials) -> Burials:
    """The jobs of something that could not be settled, as burials."""
    match item:
        case RunBatch():
            jobs = list(dict.fromkeys(row.job for row in item.rows))
        case Endings():
            jobs = [ending.job for ending in item.endings]
        case Burials():
            return item
    return Burials(item.lane, item.lane.bury_jobs(jobs, "the worker failed to settle this job; its log says why"))


def _job_line(served: Served, ending: Ending, batch: int | None) -> dict[str, object]:
    job = ending.job
    timings = job.timings or {}
    return {
        "message": "Job done.",
        "job_id": job.id,
        "request_id": job.message.request_id,
        "model": served.model,
        "version": served.version,
        "status": ending.status,
        "error": ending.error.type if ending.error else None,
        "attempt": job.lease.attempt,
        "batch": batch,
        "batch_size": job.batch_size,
        "queue_wait_ms": timings.get("queue_ms"),
        "preprocess_ms": timings.get("preprocess_ms"),
        "infer_ms": timings.get("inference_ms"),
        "postprocess_ms": timings.get("postprocess_ms"),
        "input_tokens": job.tokens,
    }
