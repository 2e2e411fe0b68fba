"""KV cache events as vLLM publishes them: hashes and bytes, what is told of a cache, subscribers that ask and that
stall."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")
pytest.importorskip("zmq", reason="KV events need pyzmq: pip install 'batchsim[gateways]'")
pytest.importorskip("msgpack", reason="KV events need msgpack: pip install 'batchsim[gateways]'")

import msgpack
import zmq

from batchsim.base.errors import ScenarioError
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Request
from batchsim.kv.block_keys import BlockKeys
from batchsim.serve.kv_event_batches import BlockHashes, Stored
from batchsim.serve.kv_events_config import KvEventsConfig, of_replica, read_config
from batchsim.serve.kv_publisher import packed
from batchsim.serve.run_server import publishing
from batchsim.serve.server import Server
from tests.support.serving.served import setup_of, simulation_of
from tests.unit.serve.test_server import COMPLETIONS, Client

VLLM = "vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, enable_prefix_caching: true}"
ANY = KvEventsConfig("tcp://*:0", "tcp://*:0")
LAST = (-1).to_bytes(8, "big", signed=True)


class Watched(Client):
    """A client of a server, and of what it publishes."""

    def __init__(self, server: Server, port: int) -> None:
        super().__init__(server, port)
        self.backend: Any = server.backend
        self.events = self.backend.kv_events
        self.context = zmq.Context()

    def endpoint(self, replica: int = 0) -> tuple[str, str]:
        return self.events.publisher.endpoints[replica]

    async def asked(self, *requests: bytes, replica: int = 0, want_last: int = 1) -> list[list[bytes]]:
        """All frames that a ROUTER sends for `requests`, until it has sent the last one `want_last` times."""
        loop = asyncio.get_running_loop()
        found: list[list[bytes]] = []
        with self.context.socket(zmq.DEALER) as asks:
            asks.setsockopt(zmq.LINGER, 0)
            asks.setsockopt(zmq.RCVTIMEO, 5000)
            asks.connect(self.endpoint(replica)[1])
            for each in requests:
                asks.send_multipart([b"", each])
            while want_last:
                frames = await loop.run_in_executor(None, asks.recv_multipart)
                found.append(frames)
                want_last -= frames[1] == LAST
        return found

    async def batches(self, since: int = 0, replica: int = 0) -> list[tuple[int, Any]]:
        """(number, batch) of all batches from number `since` on."""
        while self.events.publisher._queue:
            await asyncio.sleep(0)
        return [
            (int.from_bytes(number, "big"), msgpack.unpackb(batch))
            for _, number, batch in await self.asked(since.to_bytes(8, "big"), replica=replica)
            if number != LAST
        ]

    async def told(self, since: int = 0, replica: int = 0) -> list[dict[str, Any]]:
        """The events of all batches from number `since` on."""
        return [event for _, batch in await self.batches(since, replica) for event in batch[1]]


def watch(use: Any, more: str = "", *, policy: str = VLLM, config: KvEventsConfig = ANY, tokens: int = 16000) -> Any:
    """What `use` returns of a client of a new server that publishes."""

    async def run() -> Any:
        backend = simulation_of(setup_of(policy, more, tokens=tokens))
        with publishing(backend, config, "127.0.0.1"):
            server = Server(backend, 100)
            port = await server.start("127.0.0.1", 0)
            client = Watched(server, port)
            try:
                return await asyncio.wait_for(use(client), 30)
            finally:
                server.close()
                client.context.destroy(0)

    return asyncio.run(run())


def prompt(start: int, num_tokens: int) -> list[int]:
    return list(range(start, start + num_tokens))


def body(start: int, num_tokens: int, max_tokens: int = 1) -> dict[str, Any]:
    return {"prompt": prompt(start, num_tokens), "max_tokens": max_tokens, "ignore_eos": True}


def stored(events: list[dict[str, Any]]) -> list[int]:
    """The hashes of the blocks that were stored, in order."""
    return [number for event in events if event["type"] == "BlockStored" for number in event["block_hashes"]]


def test_hashes_are_those_of_vllm() -> None:
    """Two blocks of a prompt have the numbers that vLLM 0.32.0 computes for these token ids."""
    ids = [*range(16), *range(100_000, 100_016)]
    keys = BlockKeys(Request(0, 0, 32, 1, tokens=TokenIds.of([(prompt_stream(0), 0, 32)])), 16)
    event = BlockHashes(16).stored(Stored(keys, 0, 2, lambda start, end: ids[start:end]))
    assert event["block_hashes"] == [3262291359910021016, 11402135277261798170]
    later = BlockHashes(16).stored(Stored(keys, 1, 2, lambda start, end: ids[start:end]))
    assert later["parent_block_hash"] == 3262291359910021016 and later["block_hashes"] == [11402135277261798170]


def test_a_batch_is_the_bytes_that_vllm_sends() -> None:
    """The msgpack of a batch with an event of each kind is that of vLLM 0.32.0's own classes, byte by byte."""
    both = {"medium": "GPU", "group_idx": 0}
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None, None], "group_idx": 0}
    head = {"type": "BlockStored", "block_hashes": [1, 2**63 + 5], "parent_block_hash": None}
    events = [
        head | {"token_ids": [1, 300, 70000], "block_size": 16} | fields,
        {"type": "BlockRemoved", "block_hashes": [7]} | both,
        {"type": "AllBlocksCleared"},
    ]
    assert packed(1.5, events, 2).hex() == (
        "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cf8000000000000005b1"
        "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739301cd012cce00011170aa626c6f636b5f73697a6510a76c6f72"
        "615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f6964780084a4"
        "74797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f69647800"
        "81a474797065b0416c6c426c6f636b73436c656172656402"
    )


def test_a_prompt_is_told_once_and_its_answer_as_it_fills_blocks() -> None:
    """A prompt of 40 tokens stores two blocks; its answer the third, with its tokens, chained to the second. The same
    prompt again stores nothing new but what comes behind it."""

    async def use(client: Watched) -> Any:
        answer = await client.json(COMPLETIONS, body(1, 40, 20) | {"return_token_ids": True})
        first = await client.told()
        await client.json(COMPLETIONS, body(1, 40, 1))
        return answer["choices"][0]["token_ids"], first, (await client.told())[len(first) :]

    output, first, second = watch(use)
    assert [event["type"] for event in first] == ["BlockStored", "BlockStored"]
    begun, filled = first
    assert begun["token_ids"] == prompt(1, 32) and begun["parent_block_hash"] is None and begun["block_size"] == 16
    assert filled["token_ids"] == [*prompt(33, 8), *output[:8]]
    assert filled["parent_block_hash"] == begun["block_hashes"][1] and len(filled["block_hashes"]) == 1
    assert second == []


def test_what_is_told_is_what_the_cache_holds() -> None:
    """Of a cache too small for all prompts, the blocks stored and not removed are as many as it holds; only known ones
    are removed, each no more often than it was stored."""

    async def use(client: Watched) -> Any:
        for start in (1, 500, 1, 900, 500, 1, 1300):
            await client.json(COMPLETIONS, body(start, 150, 30))
        (core,) = client.backend.cores().values()
        return await client.told(), core.scheduler.kv.cached_blocks

    events, num_cached = watch(use, tokens=400)
    held: Counter[int] = Counter()
    for event in events:
        held.update(dict.fromkeys(event["block_hashes"], 1 if event["type"] == "BlockStored" else -1))
        assert min(held.values()) >= 0
    assert any(event["type"] == "BlockRemoved" for event in events)
    assert held.total() == num_cached > 0


def test_a_reset_is_told_and_what_follows_is_stored_anew() -> None:
    """After /reset_prefix_cache comes AllBlocksCleared, and the same prompt is stored again under the same hashes."""

    async def use(client: Watched) -> Any:
        await client.json(COMPLETIONS, body(1, 64))
        await client.call("POST", "/reset_prefix_cache")
        await client.json(COMPLETIONS, body(1, 64))
        return await client.told()

    before, cleared, after = watch(use)
    assert cleared == {"type": "AllBlocksCleared"} and after["block_hashes"] == before["block_hashes"]


def test_each_replica_publishes_for_itself() -> None:
    """Two replicas have ports of their own, and batches say whose they are; equal prompts have equal hashes."""

    async def use(client: Watched) -> Any:
        for _ in range(2):
            await client.json(COMPLETIONS, body(1, 64))
        return [await client.batches(replica=replica) for replica in (0, 1)], client.events.publisher.endpoints

    (one, two), endpoints = watch(use, "replicas: {count: 2, router: {kind: round_robin}}")
    assert [batch[2] for _, batch in one] == [0] and [batch[2] for _, batch in two] == [1]
    assert stored(one[0][1][1]) == stored(two[0][1][1]) and len({*endpoints[0], *endpoints[1]}) == 4


def test_a_subscriber_gets_topic_number_and_batch() -> None:
    """A SUB socket of the topic gets three frames, the second counting up by one; of another topic it gets none."""

    async def use(client: Watched) -> Any:
        loop = asyncio.get_running_loop()
        with client.context.socket(zmq.SUB) as mine, client.context.socket(zmq.SUB) as other:
            for sub, topic in ((mine, b"kv"), (other, b"no")):
                sub.subscribe(topic)
                sub.connect(client.endpoint()[0])
            found: list[list[bytes]] = []
            start = 0
            while len(found) < 3:  # the first batches may be sent before the subscription is there
                start += 100
                await client.json(COMPLETIONS, body(start, 64))
                if await loop.run_in_executor(None, mine.poll, 1 if not found else 5000):
                    found.append(mine.recv_multipart())
            return found, other.poll(0)

    found, others = watch(use, config=KvEventsConfig("tcp://*:0", "tcp://*:0", topic="kv"))
    numbers = [int.from_bytes(number, "big") for _, number, _ in found]
    assert [topic for topic, _, _ in found] == [b"kv"] * 3 and others == 0
    assert numbers == [*range(numbers[0], numbers[0] + 3)]
    assert all(msgpack.unpackb(batch)[1][0]["type"] == "BlockStored" for _, _, batch in found)


def test_a_replay_begins_where_it_is_asked_to_within_what_is_kept() -> None:
    """Of five batches the last three are kept: whoever asks from 0 on gets these, from 4 on one, from 9 on none."""

    async def use(client: Watched) -> Any:
        for start in range(0, 500, 100):
            await client.json(COMPLETIONS, body(start, 64))
        return [[number for number, _ in await client.batches(since)] for since in (0, 4, 9)]

    config = KvEventsConfig("tcp://*:0", "tcp://*:0", buffer_steps=3)
    assert watch(use, config=config) == [[2, 3, 4], [4], []]


def test_what_is_no_request_for_a_replay_is_ignored() -> None:
    """Frames of other forms are answered by nothing, and the next request as ever."""

    async def use(client: Watched) -> Any:
        await client.json(COMPLETIONS, body(1, 64))
        wrong = [b"", b"1", b"123456789", b"x" * 900]
        return [number for _, number, _ in await client.asked(*wrong, (0).to_bytes(8, "big"))]

    assert watch(use) == [(0).to_bytes(8, "big"), LAST]


def test_a_server_goes_on_while_more_batches_come_than_may_wait() -> None:
    """Where the queue is full a batch is dropped, and so is its number; the next ones are chained as ever."""

    async def use(client: Watched) -> Any:
        publisher = client.events.publisher
        await client.json(COMPLETIONS, body(1, 64, 60))
        events = await client.told()
        return publisher.num_dropped, stored(events)

    async def held_up(client: Watched) -> Any:
        publisher = client.events.publisher
        publisher._config = KvEventsConfig("tcp://*:0", "tcp://*:0", max_queue_size=0)
        await client.json(COMPLETIONS, body(1, 64, 20))
        publisher._config = ANY
        await client.json(COMPLETIONS, body(1, 64, 60))
        return publisher.num_dropped, await client.batches()

    dropped, hashes = watch(use)
    num_dropped, batches = watch(held_up)
    assert dropped == 0 and num_dropped == 2
    assert [number for number, _ in batches] == [*range(2, 2 + len(batches))]
    assert stored([event for _, batch in batches for event in batch[1]])[-1] == hashes[-1] or len(hashes) == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no JSON object"),
        ('{"enable": true}', "'enable' is none of its fields"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events is 1. Write true or false"),
        ('{"publisher": "nats"}', "publisher is 'nats'. Write zmq or null"),
        ('{"hwm": 0}', "hwm is 0. Write a whole number from 1"),
        ('{"buffer_steps": 1.5}', "buffer_steps is 1.5"),
        ('{"max_queue_size": true}', "max_queue_size is True"),
        ('{"topic": 7}', "topic is 7. Write a text"),
        ('{"endpoint": "http://x:1"}', "endpoint is 'http://x:1'. Write tcp://*:PORT"),
        ('{"endpoint": "tcp://*:70000"}', "endpoint is 'tcp://*:70000'"),
        ('{"replay_endpoint": 5}', "replay_endpoint is 5"),
        ('{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}', "Give them two ports"),
    ],
)
def test_a_bad_config_is_one_line(text: str, says: str) -> None:
    """Each says the option, the field and its value."""
    with pytest.raises(ScenarioError) as error:
        read_config(text)
    message = str(error.value)
    assert message.startswith("--kv-events-config") and says in message and "\n" not in message


def test_events_are_off_unless_enabled() -> None:
    """As in vLLM: without enable_kv_cache_events, or with publisher null, there is no publisher."""
    assert read_config("{}") is None and read_config('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    assert read_config('{"publisher": "zmq"}') is None
    config = read_config('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6000", "hwm": 9}')
    assert config == KvEventsConfig("tcp://*:5557", "tcp://*:6000", hwm=9)


def test_ports_count_up_by_replica() -> None:
    """`*` is where the server listens; another address is connected to; no port is above 65535."""
    assert of_replica("tcp://*:5557", 2, "127.0.0.1") == ("tcp://127.0.0.1:5559", True)
    assert of_replica("tcp://*:5557", 0, "::1") == ("tcp://[::1]:5557", True)
    assert of_replica("tcp://10.0.0.1:5557", 1, "127.0.0.1") == ("tcp://10.0.0.1:5558", False)
    assert of_replica("ipc:///tmp/kv", 1, "localhost") == ("ipc:///tmp/kv_dp1", True)
    with pytest.raises(ScenarioError, match="replica 1 would have port 65536"):
        of_replica("tcp://*:65535", 1, "127.0.0.1")


def test_engines_without_such_a_cache_are_refused_in_a_line() -> None:
    """SGLang's tree, and an engine without a prefix cache, tell no KV events."""
    for policy in ("sglang: {max_running_requests: 8}", "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"):
        with pytest.raises(ScenarioError, match="KV events come from a prefix cache of blocks"):
            watch(None, policy=policy)


def test_a_port_that_is_taken_is_one_line() -> None:
    """The second server at the same port says which."""

    async def use(client: Watched) -> str:
        taken = client.endpoint()[0].rpartition(":")[2]
        backend = simulation_of(setup_of(VLLM, ""))
        with (
            pytest.raises(ScenarioError) as error,
            publishing(backend, KvEventsConfig(f"tcp://*:{taken}"), "127.0.0.1"),
        ):
            pass
        return str(error.value)

    assert "Address already in use. Give another." in watch(use)
