"""That nothing of a life is lost or counted twice: its parts and its chapters against its times."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from batchsim.explain.story import Stories
from batchsim.kernel.record import FINISHED, MISSING, Records
from batchsim.metrics.attribution import part_times


def check_lives(records: Records) -> None:
    """To the ns: all parts sum to E2E, or to when the request was given up, those before the first token to TTFT,
    chapters without gaps to the same parts."""
    before: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    by_part: Counter[tuple[int, str]] = Counter()
    ids = records.requests["request_id"].tolist()
    for times in part_times(records):
        for i, ns, after_first in zip(
            times.request.tolist(), times.ns.tolist(), times.after_first.tolist(), strict=True
        ):
            whole[ids[i]] += ns
            before[ids[i]] += 0 if after_first else ns
            by_part[ids[i], times.part] += ns  # of a part from which others are taken, several times
    assert min(by_part.values(), default=0) >= 0, by_part
    stories, by_chapter = Stories(records), {}
    for row in records.requests:
        id_ = int(row["request_id"])
        end_ns = row["delivered_ns"] if row["outcome"] == FINISHED else row["ended_ns"]
        assert whole[id_] == end_ns - row["sent_ns"]
        if row["first_token_ns"] != MISSING:
            assert before[id_] == row["first_token_ns"] - row["sent_ns"]
        story = stories.tell(id_)
        assert story.ns == whole[id_]
        assert all(one.end_ns == next_.start_ns for one, next_ in pairwise(story.chapters))
        assert all(sum(chapter.parts.values()) == chapter.ns > 0 for chapter in story.chapters)
        by_chapter |= {(id_, part): ns for part, ns in story.parts().items()}
    assert by_chapter == {part: ns for part, ns in by_part.items() if ns}
