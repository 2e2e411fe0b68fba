"""SGLang 0.5.23 that decodes what other engines have prefilled (`--disaggregation-mode decode`).

Rule, at each call, before the batch is chosen:

1. Retracted requests come back, first come first served, while the pages of what was computed and
   `num_reserved_decode_tokens` fit the budget of 3 without its second term. While any is left, nothing of 2 to 4 is
   done.
2. All else is done at every `disaggregation_decode_polling_interval`-th call.
3. In order of arrival, or by priority, requests get pages for their prompts, which the prefill engine then knows:
   while there is a metadata buffer (two for each of max_running_requests) and a slot (`extra_slots` beyond these), and

       need   = max(pages of the prompt + reserved, prompt + min(cap, 4096) - retractable)
       budget = free - max(reserved * requests here, max(min(cap, 4096) + prompt) of the running - retractable)

   with `retractable` the known tokens of the running. Of these are those, too, that ended since the call before.
4. Whose transfer is over is let into the queue; a request whose transfer failed ends.
5. As many as there are places of max_running_requests run from this very call on. Their first tokens, which came with
   the KV, are out then; whose first token is the last one has ended.
6. Short of pages a request is retracted as by `sglang`, but its KV is copied to the host and it waits apart; with
   `disaggregation_decode_retraction_backup` none it ends. So does one that lacks a page alone.

Source: python/sglang/srt/disaggregation/decode.py, decode_schedule_batch_mixin.py and managers/schedule_batch.py of the
0.5.23 wheel.
Simplifies: no prefix cache, timeouts, or hand-shakes; an engine at rest polls without end. Where SGLang hangs there is
a way on: what can never fit is rejected, and with nothing to run the retracted come back without a reserve, or
transfers are looked at. A cancel takes effect at once.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_rooms import Room, RoomConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import MISSING, Event, Sequence
from batchsim.policies.systems.sglang.pd_config import SglangPdConfig
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.token_budget import CLIP_MAX_NEW_TOKENS

_BUFFERS = 2  # metadata buffers for each request that may run


class SglangDecode(Sglang):
    """The scheduler. A request has a sequence here before its prompt is computed: a stand-in for that of its life."""

    evidence = "hand-derived"

    def __init__(self, config: SglangPdConfig, context: PolicyContext) -> None:
        if not isinstance(context.connector, RoomConnector):
            raise ScenarioError("sglang: an engine decodes for others if it has a RoomConnector.")
        self._reserve = config.num_reserved_decode_tokens
        super().__init__(config, context)
        self.connector = context.connector
        self._pd = config
        self._slots = self._most_running()
        self._asked: list[Room] = []  # have no pages yet
        self._coming: dict[int, Room] = {}  # by request, in the order in which they got them
        self._held: dict[int, Sequence] = {}  # of all these the sequence by which they hold pages
        self._retracted: list[Sequence] = []
        self._copied: list[tuple[Sequence, int]] = []  # to the host, by this call
        self._ended: list[tuple[int, int]] = []  # since the latest call: known tokens, and prompt and cap
        self._arrived: list[Sequence] = []  # by this call
        self._changes = False  # whether this look has freed pages, or ended what another would not count
        self._calls = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._held) + len(self._retracted)

    def notice(self) -> None:
        """Does nothing: what is over is asked by `schedule`."""

    def leapt(self, batches: list[Batch]) -> None:
        """Does nothing: no launch is a look at transfers."""

    def add(self, seq: Sequence, now_ns: int) -> None:
        """Takes in the life of a request whose prompt is computed, in the place of what stood in for it."""
        number = seq.request.id
        stand_in = self._held[number]
        seq.max_output_tokens = stand_in.max_output_tokens
        self.kv.free(stand_in)
        room = self.kv.allocate(seq, seq.request.prompt_tokens)
        assert room, "its blocks were there"
        self._held[number] = seq
        self.connector.pending.remove(number)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.running:
            return super().cancel(seq, now_ns)
        number = seq.request.id
        if self._held.pop(number, None) is not None:
            del self._coming[number]
        elif seq in self._retracted:
            self._retracted.remove(seq)
            self.waiting.forget(seq)
        else:
            self.waiting.remove(seq)
            self.waiting.forget(seq)
        self.kv.free(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._take_in_asked(now_ns)
        in_flight = self._last is not None
        if self._ahead:
            self.batch.await_results(self._last)
        self._last = None
        preempted: list[Sequence] = []
        swap_in: list[tuple[Sequence, int]] = []
        self._copied = []
        hungry = False
        while True:
            self._changes = bool(self._ended)
            polled = self._look(now_ns, hungry=hungry)
            swap_in += self._run_waiting(now_ns)
            self._ended = []
            decodes = self._make_decodes_fit(preempted)
            if decodes or in_flight or preempted or hungry:
                break
            # With nothing to run it polls again and again.
            if polled and not self._changes:
                if not self._retracted:
                    break
                hungry = True
        self.free_blocks_asked = self.kv.num_free
        for seq in [seq for seq in self._arrived if not seq.num_output_tokens]:
            self.events.append(Event("waits", seq, "no_slot"))
        self._arrived = []
        if not (decodes or preempted):
            return self._idle(now_ns)
        group = self.group if decodes else None
        work = Batch(group, [], 0, preempted=preempted, swap_out=self._copied, swap_in=swap_in)
        if decodes:
            self._last = work
        return work

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        for seq in finished:
            if seq in self.running:
                if seq.group is not None:  # else it was taken off by its cap before
                    tokens = seq.num_tokens - seq.num_wasted_tokens
                    self._ended.append((tokens, self._prompt_and_cap(seq)))
                self._finish(seq)
        if not self._ahead:
            self._last = None
        return finished

    # ---- one call

    def _take_in_asked(self, now_ns: int) -> None:
        """Takes in requests that other engines are to prefill, and drops what has ended there."""
        asked, self.connector.asked = self.connector.asked, []
        for room in asked:
            if room in self.connector.closed:
                continue
            seq = Sequence(room.request)
            num_events = len(self.events)
            super().add(seq, now_ns)
            if len(self.events) > num_events:
                self.connector.carrier.refuse(room, self.events.pop().detail, now_ns)
                self.connector.pending.remove(room.request.id)
                continue
            self._held[room.request.id] = seq
            self._asked.append(room)
        closed, self.connector.closed = self.connector.closed, []
        for room in closed:
            number = room.request.id
            if number in self._held:
                self.kv.free(self._held.pop(number))
                if self._coming.pop(number, None) is None:
                    self._asked.remove(room)
            self.connector.pending.discard(number)

    def _enter(self, seq: Sequence) -> None:
        """Does nothing: it is taken in with its room."""

    def _look(self, now_ns: int, *, hungry: bool) -> bool:
        """Brings back the retracted, gives pages to prompts and looks at transfers; returns whether this call does.
        `hungry`: there is nothing to run but what is retracted."""
        self._bring_back(hungry=hungry)
        if self._retracted and not hungry:
            return True
        self._calls = (self._calls + 1) % self._pd.disaggregation_decode_polling_interval
        if self._calls and not hungry:
            return False
        if not self._retracted:
            self._preallocate(now_ns)
        self._take_over(now_ns)
        return True

    @property
    def _num_active(self) -> int:
        """Requests for which tokens are reserved."""
        return len(self.batch) + len(self._ended) + len(self._coming) + len(self.waiting)

    @property
    def _num_slots_free(self) -> int:
        taken = len(self.running) + len(self._coming) + len(self.waiting)
        return self._slots + self._pd.extra_slots - taken

    def _bring_back(self, *, hungry: bool) -> None:
        kv, page, active, taken = self.kv, self.kv.block_size, self._num_active, 0
        back: list[Sequence] = []
        while self._retracted and self._num_slots_free - taken > 0:
            seq = self._retracted[0]
            tokens = seq.num_tokens - 1
            budget = kv.num_free * page - self._reserve * (active + taken)
            fits = kv.blocks_for(tokens) * page + self._reserve <= budget
            if not (fits or (hungry and kv.blocks_for(tokens + 1) <= kv.num_free)):
                break
            kv.allocate(seq, tokens)
            seq.start_from_cache(tokens)
            back.append(self._retracted.pop(0))
            taken += 1
        for seq in back:
            self.waiting.push(seq)

    def _preallocate(self, now_ns: int) -> None:
        """Gives pages to prompts, the first of those asked for first, until one does not get any."""
        if not self._asked:
            return
        kv, page = self.kv, self.kv.block_size
        if self.config.enable_priority_scheduling:
            sign = 1 if self._low_first else -1
            self._asked.sort(key=lambda room: sign * room.request.priority)
        known = self.group.total_context_tokens + len(self.batch) - self.batch.num_in_flight
        retractable = known + sum([tokens for tokens, _ in self._ended])
        longest = [*map(self._prompt_and_cap, self.group.members), *(most for _, most in self._ended)]
        single = max(longest, default=retractable) - retractable
        active, num_buffers, slots = self._num_active, _BUFFERS * self._slots - len(self._coming), self._num_slots_free
        taken: list[Room] = []
        for room in self._asked:
            if min(num_buffers, slots) <= len(taken):
                break
            seq = self._held[room.request.id]
            budget = kv.num_free * page - max(self._reserve * (active + len(taken)), single)
            if self._need(seq, retractable) > budget:
                break
            kv.allocate(seq, room.request.prompt_tokens)
            taken.append(room)
        del self._asked[: len(taken)]
        for room in taken:
            self._coming[room.request.id] = room
            self.connector.carrier.address(room, now_ns)

    def _prompt_and_cap(self, seq: Sequence) -> int:
        return seq.request.prompt_tokens + min(seq.max_output_tokens, CLIP_MAX_NEW_TOKENS)

    def _need(self, seq: Sequence, retractable: int) -> int:
        """KV tokens that the budget must have for the prompt of `seq`."""
        pages = self.kv.blocks_for(seq.request.prompt_tokens) * self.kv.block_size
        return max(pages + self._reserve, self._prompt_and_cap(seq) - retractable)

    def _take_over(self, now_ns: int) -> None:
        """Lets those into the queue whose KV is there."""
        for number, room in list(self._coming.items()):
            if room.over_ns == MISSING or room.over_ns > now_ns or number in self.connector.pending:
                continue
            del self._coming[number]
            seq = self._held.pop(number)
            self.connector.carrier.take_in(room, now_ns)
            if room.fails:
                self.kv.free(seq)
                self._changes = True
                self.events.append(Event("rejected", seq, "kv_transfer_failed", detail="its KV could not be sent"))
            else:
                self.waiting.push(seq)
                self._arrived.append(seq)

    def _run_waiting(self, now_ns: int) -> list[tuple[Sequence, int]]:
        """Has those run for which there is a place; returns what was retracted before, with its pages."""
        places = self._slots - len(self.batch) - len(self._ended)
        back: list[tuple[Sequence, int]] = []
        while places > 0 and len(self.waiting):
            places -= 1
            seq = self.waiting.pop()
            number = seq.request.id
            if seq.num_output_tokens:
                back.append((seq, self.kv.held(seq)))
            else:
                seq.take_first_token()
                ends = seq.max_output_tokens <= 1 or self.connector.rooms[number].ends
                self.events.append(Event("first_token", seq, "last" if ends else ""))
                if ends:
                    self.kv.free(seq)
                    self.waiting.forget(seq)
                    self._changes = True
                    continue
            self.batch.place([(seq, 0)], ahead=False)
            self.batch.join_prebuilt(seq)
            self.running[seq] = None
        return back

    def _retract(self, victim: Sequence) -> bool:
        num_blocks = self.kv.held(victim)
        if self._pd.disaggregation_decode_retraction_backup == "none":
            self.events.pop()  # that it is preempted
            self._end(victim, "retracted", "its KV was given up for others'")
            return False
        self.batch.retract(victim)
        del self.running[victim]
        self._retracted.append(victim)
        self._copied.append((victim, num_blocks))
        return True

    def _give_up(self, seq: Sequence) -> None:
        free = f"{self.kv.num_free} KV blocks free with no other request to retract"
        self._end(seq, "kv_blocks", free)

    def _end(self, seq: Sequence, reason: str, detail: str) -> None:
        """Ends a decode with an error."""
        self.batch.release(seq)
        del self.running[seq]
        self._forget(seq)
        self._changes = True
        self.events.append(Event("rejected", seq, reason, detail=detail))

    def _never_fits(self, seq: Sequence) -> bool:
        if super()._never_fits(seq):
            return True
        pool, need = self.kv.num_blocks * self.kv.block_size, self._need(seq, 0)
        if need <= pool:
            return False
        detail = f"{need} KV tokens with the {self._reserve} that are reserved, {pool} in the pool of the decode engine"
        self.events.append(Event("rejected", seq, "never_fits", detail=detail))
        return True

    def _idle(self, now_ns: int) -> Idle:
        over = [room.over_ns for room in self._coming.values() if room.over_ns > now_ns]
        return Idle(min(over)) if over else IDLE
