"""What the journal derives from batches alone, where a policy gives no reason."""

from __future__ import annotations

from sim.journal import Journal
from sim.record import PREFILL, SAT_OUT, Recorder
from sim.types import Arrival, Batch, Request, Sequence


def test_a_prompt_that_a_batch_leaves_out_lacked_tokens_unless_the_policy_says_otherwise() -> None:
    """A prefill that gets no chunk though its prompt is not done sat out: by the given reason, or `token_budget`."""
    recorder = Recorder()
    journal = Journal(recorder, 0)
    told, untold, other = (Sequence(Request(i, 0, 8, 1)) for i in range(3))
    for seq in (told, untold, other):
        journal.begin(seq, Arrival(seq.request, 1))
    journal.scheduled(Batch(None, [(told, 4), (untold, 4)], 8), 0, {})
    journal.scheduled(Batch(None, [(other, 8)], 8), 10, {told: ("kv_blocks", 2)})
    records = recorder.records()
    rows = [
        (s["time_ns"], s["request_id"], s["state"], records.texts[s["reason"]], s["blocker"]) for s in records.states
    ]
    assert rows == [
        (0, 0, PREFILL, "", -1),
        (0, 1, PREFILL, "", -1),
        (10, 2, PREFILL, "", -1),
        (10, 0, SAT_OUT, "kv_blocks", 2),
        (10, 1, SAT_OUT, "token_budget", -1),
    ]
