"""How jobs are cut."""

import numpy as np
import pytest

from offloadd.mover.messages import Job, Operation
from offloadd.mover.slices import cut
from offloadd.units import KIB, MIB

from .mover_harness import make_records


def _lengths(operation, records, slot_bytes, threads=4, staging=8 * MIB):
    job = Job(job=1, move=1, operation=operation, slot_bytes=slot_bytes, blocks=records.tobytes())
    slices = cut(job, thread_count=threads, staging_slot_bytes=staging)
    assert np.concatenate([piece.records["position"] for piece in slices]).tolist() == records["position"].tolist()
    return [len(piece.records) for piece in slices]


def test_sixteen_blocks_on_four_threads_are_four_slices_of_four():
    assert _lengths(Operation.RESTORE, make_records(range(16), 640 * KIB), 644 * KIB) == [4, 4, 4, 4]


def test_a_long_job_gives_every_thread_equally_many_slices_that_fit_into_staging():
    lengths = _lengths(Operation.RESTORE, make_records(range(512), 640 * KIB), 644 * KIB)
    assert len(lengths) % 4 == 0 and max(lengths) * 644 * KIB <= 8 * MIB and max(lengths) - min(lengths) <= 1


def test_a_slice_never_spans_a_gap_or_a_slab():
    slots = [0, 1, 2, 5, 6, 7, 8, 9]
    records = make_records(range(8), 640 * KIB, slots=slots)
    records["slab"][5:] = 1
    assert _lengths(Operation.RESTORE, records, 644 * KIB, threads=1) == [3, 2, 3]


def test_one_block_is_one_slice():
    assert _lengths(Operation.EVICT, make_records([3], 640 * KIB), 644 * KIB) == [1]
    assert _lengths(Operation.EVICT, make_records([3, 4], 20 * MIB), 20 * MIB + 4096) == [1, 1]


def test_a_vectored_slice_stays_below_the_kernels_limit_of_buffers():
    assert max(_lengths(Operation.SPILL, make_records(range(700), 4096), 8192, threads=1, staging=64 * MIB)) <= 512


def test_arena_jobs_are_cut_by_bytes_whatever_their_slots():
    lengths = _lengths(Operation.ARENA_RESTORE, make_records(range(512), 640 * KIB, slots=[0] * 512), 0)
    assert len(lengths) % 4 == 0 and max(lengths) * 640 * KIB <= 16 * MIB
    assert _lengths(Operation.ARENA_EVICT, make_records(range(4), 20 * MIB, slots=[0] * 4), 0) == [1] * 4


def test_an_empty_job_has_no_slices_and_an_unknown_operation_is_refused():
    assert cut(Job(job=1, move=1, operation=Operation.NULL, slot_bytes=0, blocks=b""), thread_count=4, staging_slot_bytes=MIB) == []
    with pytest.raises(ValueError, match="99"):
        cut(Job(job=1, move=1, operation=99, slot_bytes=0, blocks=b""), thread_count=4, staging_slot_bytes=MIB)
