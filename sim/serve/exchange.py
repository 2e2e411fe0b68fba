"""One request and its answers on their way to the client: whole, or piece by piece as the tokens come.

A client that does not read gets, when it reads again, all that has come since in one piece; only counts are kept for
it, since the text of a token can be made at any time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from batchsim.kernel.record import CANCELLED, FINISHED, REJECTED
from batchsim.serve.answers import Answer
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import CompletionRequest, Prompt
from batchsim.serve.connection import Connection
from batchsim.serve.stops import RunningText, StopSearch
from batchsim.serve.words import Texts

EVENTS = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"


class Engines(Protocol):
    """The server, as an exchange uses it."""

    words: Texts

    def tokens(self, answer: Answer | None, start: int, end: int) -> list[int]:
        """The ids of output tokens `start` to `end` - 1 of an answer; none of one that no engine was asked for."""
        ...

    def token(self, answer: Answer, place: int) -> int:
        """The id of output token `place` of an answer."""
        ...

    def cancel(self, answer: Answer) -> None:
        """Gives up an answer."""
        ...

    def send(self, reply: Connection, num_tokens: int, make: Callable[[], bytes]) -> None:
        """Answers with the bytes that `make` returns, the text of `num_tokens` tokens."""
        ...

    def rejection(self, answer: Answer) -> ApiError:
        """The error for an answer that an engine refused, or did not finish."""
        ...


class Choice:
    """One answer of a request: how much of it the client has, and how it ended."""

    __slots__ = (
        "answer",
        "before",
        "finish_reason",
        "held",
        "index",
        "num_cut",
        "num_sent",
        "num_tokens",
        "prompt",
        "stop_reason",
        "stops",
        "text",
    )

    def __init__(self, index: int, prompt: Prompt, stops: StopSearch | None) -> None:
        self.index = index
        self.prompt = prompt
        self.answer: Answer | None = None
        self.before = b""  # the first part of each of its pieces, up to the token
        self.num_tokens = self.num_sent = 0
        self.num_cut = 0  # letters at the end of its text that are those of a stop string, or behind it
        self.stops = stops
        self.held = ""  # the last letters of its text, not sent yet: a stop string may have begun with them
        self.text = RunningText()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


class Exchange:
    """A request of `choices`, answered on `reply`."""

    def __init__(
        self, id: str, created_s: int, request: CompletionRequest, reply: Connection, engines: Engines
    ) -> None:
        self.id = id
        self.created_s = created_s
        self.request = request
        self.reply = reply
        self.engines = engines
        cut = request.stop or request.stop_token_ids
        self.choices = [
            Choice(
                index,
                request.prompts[index // request.n],
                StopSearch(request.stop, request.stop_token_ids, request.min_tokens) if cut else None,
            )
            for index in range(request.n * len(request.prompts))
        ]
        self._begun = self._over = False
        self.is_stalled = False  # sends nothing after its first piece
        self.ended: Callable[[], None] = lambda: None
        kind = ("chat.completion.chunk" if request.is_chat else "text_completion") if request.stream else ""
        head = {"id": id, "object": kind, "created": created_s, "model": request.model}
        self._head = "data: " + json.dumps(head)[:-1] + ', "choices": [{"index": '
        # What is around the text of most pieces, made once: at 50,000 tokens a second each microsecond counts.
        opening, closing = ('"delta": {"content": " ', '"}') if request.is_chat else ('"text": " ', '"')
        for choice in self.choices:
            choice.before = f"{self._head}{choice.index}, {opening}".encode()
        says_more = request.return_token_ids or request.continuous_usage  # pieces hold more than their text
        # One token and nothing else, which most pieces are, goes by a short way.
        self._is_plain = request.stream and engines.words.stands_alone and not (says_more or cut)
        self._after = f'{closing}, "logprobs": null, "finish_reason": null, "stop_reason": null}}]}}\n\n'.encode()
        reply.hung_up = self.give_up
        if request.stream:
            reply.readable = self._catch_up

    def give_up(self) -> None:
        """Gives up all that has not ended: the client has left."""
        if self._over:
            return
        self._end()
        for choice in self.choices:
            if choice.answer is not None:
                self.engines.cancel(choice.answer)

    def abort(self) -> None:
        """Ends what has not ended as aborted: the engines fall asleep."""
        for choice in self.choices:
            if choice.finish_reason is None and not self._over:
                choice.finish_reason = "abort"
                if choice.answer is not None:
                    self.engines.cancel(choice.answer)
                self._pass_on(choice)

    def _end(self) -> None:
        self._over = True
        self.ended()

    def listener(self, choice: Choice) -> Callable[[Answer], None]:
        """The callback for further tokens, or the end, of a choice."""
        return partial(self._on_delivery, choice)

    def _on_delivery(self, choice: Choice, answer: Answer) -> None:
        if self._over or choice.finish_reason is not None:
            return
        num_sent = choice.num_sent
        if (
            self._is_plain
            and answer.outcome is None
            and answer.num_tokens - num_sent == 1
            and num_sent
            and not self.reply.is_paused
            and not self.is_stalled
        ):
            choice.num_tokens = choice.num_sent = num_sent + 1
            self.reply.write(b"%b%d%b" % (choice.before, self.engines.token(answer, num_sent), self._after))
            return
        choice.num_tokens = answer.num_tokens
        if choice.stops is not None:
            self._cut_at_stop(choice, choice.stops, answer)
        if answer.outcome is not None and choice.finish_reason is None:
            if answer.outcome != FINISHED:
                self._fail(answer)
                return
            by_length = choice.num_tokens >= answer.asked.max_output_tokens and not answer.by_eos
            choice.finish_reason = "length" if by_length else "stop"
        self._pass_on(choice)

    def _pass_on(self, choice: Choice) -> None:
        """Sends the tokens of a choice so far, or the whole answer once it is complete."""
        if self.request.stream:
            if not self._waits:
                self._push(choice)
        elif all(each.finish_reason is not None for each in self.choices):
            self.engines.send(self.reply, self.size, self._whole)
            self._end()

    def _fail(self, answer: Answer) -> None:
        """Ends the exchange with an error: a status where nothing was sent yet, else the last piece."""
        error = self.engines.rejection(answer)
        self.give_up()
        if self._begun:
            self.reply.write(b"data: " + error.body() + b"\n\n" + _DONE)
            self.reply.end()
        else:
            self.reply.answer(error.status, error.body(), headers=error.headers)

    def _cut_at_stop(self, choice: Choice, stops: StopSearch, answer: Answer) -> None:
        """Ends a choice where its text has one of the stop strings, or at a stop token, as its client asked; cancels it
        at the engine."""
        tokens, is_last = partial(self.engines.tokens, answer), answer.outcome is not None
        stop = stops.find(answer.num_tokens, self.engines.words, tokens, is_last=is_last)
        if stop is not None:
            choice.num_tokens, choice.stop_reason, choice.num_cut = stop
            choice.finish_reason = "stop"
            self.engines.cancel(answer)

    # ---- piece by piece

    def _catch_up(self) -> None:
        for choice in self.choices:
            if not self._over and not self._waits:
                self._push(choice)

    @property
    def _waits(self) -> bool:
        return self.reply.is_paused or (self.is_stalled and self._begun)

    def resume(self) -> None:
        """Ends a stall: what has come since goes out."""
        self.is_stalled = False
        self._catch_up()

    def _push(self, choice: Choice) -> None:
        """Sends the tokens of a choice that were not sent yet, in one piece."""
        start, end, answer, request = choice.num_sent, choice.num_tokens, choice.answer, self.request
        if self.reply.is_gone or start < 0 or (start == end and choice.finish_reason is None):
            return
        if not self._begun:
            self._begun = True
            self.reply.begin(EVENTS)
        first = start == 0
        ids = self.engines.tokens(answer, start, end)
        text = choice.held + self._new_text(choice, ids, end)
        if choice.stops is not None and choice.finish_reason is None:
            at = max(len(text) - choice.stops.num_held, 0)
            text, choice.held = text[:at], text[at:]
        text = self._text(choice, start, text)
        more = ""
        if request.return_token_ids:
            prompt_ids = json.dumps(choice.prompt.ids) if first else "null"
            more = f', "prompt_token_ids": {prompt_ids}, "token_ids": {json.dumps(ids)}'
        finish = "null" if choice.finish_reason is None else f'"{choice.finish_reason}"'
        stop = "null" if choice.stop_reason is None else json.dumps(choice.stop_reason)
        if request.is_chat:
            role = '"role": "assistant", ' if first else ""
            body = f'"delta": {{{role}"content": {json.dumps(text)}}}'
        else:
            body = f'"text": {json.dumps(text)}'
        usage = self._usage_so_far(choice)
        tail = f', "logprobs": null, "finish_reason": {finish}, "stop_reason": {stop}{more}}}]{usage}}}\n\n'
        piece = f"{self._head}{choice.index}, {body}{tail}"
        choice.num_sent = end
        if choice.finish_reason is not None:
            choice.num_sent = -1  # all of it, and its end
            if all(each.num_sent < 0 for each in self.choices):
                self._end()
                self.reply.write(piece.encode() + self._last_events())
                self.reply.end()
                return
        self.reply.write(piece.encode())

    def _usage_so_far(self, choice: Choice) -> str:
        """The usage in a piece, of its choice alone, where `continuous_usage_stats` asks for it."""
        if not self.request.continuous_usage:
            return ""
        cached = choice.answer.cached_tokens if choice.answer else 0
        return f', "usage": {json.dumps(_usage(choice.prompt.num_tokens, choice.num_tokens, cached))}'

    def _last_events(self) -> bytes:
        if not self.request.include_usage:
            return _DONE
        head = self._head.partition(', "choices"')[0]
        return f'{head}, "choices": [], "usage": {json.dumps(self._usage())}}}\n\n'.encode() + _DONE

    def _new_text(self, choice: Choice, ids: list[int], end: int) -> str:
        """The text that `ids`, the tokens up to `end`, add to what was sent. Half a letter waits for its other half."""
        words, tokens = self.engines.words, partial(self.engines.tokens, choice.answer)
        if words.stands_alone:
            return words.decode(ids)
        return choice.text.up_to(end, words, tokens, is_last=choice.finish_reason is not None)

    def _text(self, choice: Choice, start: int, text: str) -> str:
        """`text` from token `start` on as the client gets it: up to where it stops, behind the prompt's if asked."""
        text = text[: max(len(text) - choice.num_cut, 0)]
        if self.request.echo and start == 0:
            text = self.engines.words.decode(choice.prompt.ids) + text
        return text

    # ---- whole

    @property
    def size(self) -> int:
        """The tokens, or the numbers, of the whole answer."""
        return sum(choice.num_tokens for choice in self.choices)

    def _whole(self) -> bytes:
        request = self.request
        response: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": self.created_s,
            "model": request.model,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
        }
        return json.dumps(response).encode()

    def _choice(self, choice: Choice) -> dict[str, Any]:
        ids = self.engines.tokens(choice.answer, 0, choice.num_tokens)
        text = self._text(choice, 0, self.engines.words.decode(ids))
        fields: dict[str, Any] = {"index": choice.index}
        if self.request.is_chat:
            fields["message"] = {"role": "assistant", "content": text}
        else:
            fields["text"] = text
        fields |= {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self.request.return_token_ids:
            fields |= {"prompt_token_ids": choice.prompt.ids, "token_ids": ids}
        return fields

    def _usage(self) -> dict[str, Any]:
        prompt = sum(each.num_tokens for each in self.request.prompts)
        output = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.answer.cached_tokens for choice in self.choices[:: self.request.n] if choice.answer)
        return _usage(prompt, output, cached)


def _usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def rejection(answer: Answer, detail: str) -> ApiError:
    """The error for an answer that ended otherwise than it should; `detail` has the engine's words."""
    if answer.outcome == REJECTED and answer.reason == "queue_full":
        return ApiError(429, f"The queue is full: {detail}.", retry_after_s=1)
    if answer.outcome == REJECTED:
        return ApiError(400, f"{answer.reason}: {detail}")
    if answer.outcome == CANCELLED:
        return ApiError(500, f"The request was cancelled: {answer.reason}.")
    return ApiError(503, f"The request was not finished: {answer.reason}.", retry_after_s=1)
