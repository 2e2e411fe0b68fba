"""The policy that a scenario names: one of ours, or a user's own by its import path `module:Class`.

To import a module is to run it, so a name in a file is imported only where the caller allows it.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from batchsim.base.errors import ScenarioError
from batchsim.base.installed import is_installed, of_package

if TYPE_CHECKING:
    from batchsim.kernel.policy_config import PolicyConfig

_METHODS = ("add", "cancel", "schedule", "repeat", "complete")
_LETTERS = 200  # of what an import says


def find_policy(kind: str, *, allow_code: bool) -> tuple[type[PolicyConfig], Any]:
    """Config and class of a registered policy, or of a user's own named `module:Class`.

    With `allow_code` the module is imported; without, a user's own policy is refused. ScenarioError then, and for what
    is no policy or cannot be imported, whatever the module does.
    """
    known = _registered()
    if kind in known:
        return known[kind]
    if ":" not in kind:
        raise ScenarioError(f"policy {kind[:_LETTERS]} cannot be imported: your own is named module:Class. Correct it.")
    check_allowed(kind, allow_code=allow_code)
    with own_code("policy", kind):
        return _policy(kind)


def _registered() -> Mapping[str, tuple[type[PolicyConfig], Any]]:
    """The registry, which imports every scheduler; a check whether code is allowed does without."""
    from batchsim.policies.registry import POLICIES

    return POLICIES


def check_allowed(kind: str, *, allow_code: bool) -> None:
    """ScenarioError unless `allow_code`: `kind` names a user's own code, which importing it runs. What an installed
    package adds by an entry point is allowed."""
    if not allow_code and not is_installed(kind):
        raise ScenarioError(
            f"{kind[:_LETTERS]} is code of its own, which a scenario runs only where it is allowed to. Add --allow-code"
            " (in Python allow_code=True) if you trust it."
        )


def policy_and_config(kind: str | type) -> tuple[type[PolicyConfig], Any]:
    """Config and class of a registered policy by its name, or of a class that is one. ScenarioError for any other."""
    return _registered()[kind] if isinstance(kind, str) else (_config_of(kind, kind.__qualname__), kind)


def _policy(kind: str) -> tuple[type[PolicyConfig], Any]:
    module_name, _, name = kind.partition(":")
    policy = getattr(importlib.import_module(module_name), name)
    return _config_of(policy, kind), policy


def _config_of(policy: Any, kind: str) -> type[PolicyConfig]:
    from batchsim.kernel.policy_config import PolicyConfig

    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ScenarioError(
            f"{kind} has no {', '.join(missing)}. See the Scheduler protocol in batchsim.kernel.protocols."
        )
    config = getattr(policy.__init__, "__annotations__", {}).get("config")
    config = getattr(sys.modules[policy.__module__], config, None) if isinstance(config, str) else config
    if config is None and policy.__init__ is not object.__init__:  # compiled functions have no annotations
        config = next((asked for asked, ours in _registered().values() if ours.__init__ is policy.__init__), None)
    if not isinstance(config, type) or not is_dataclass(config):
        raise ScenarioError(
            f"{kind}.__init__ has no config that is a dataclass of its module. Write"
            " def __init__(self, config: MyConfig, context)."
        )
    if not issubclass(config, PolicyConfig):
        raise ScenarioError(
            f"{kind}: its config is no PolicyConfig, which tells slots, KV memory and knobs. Write"
            f" class {config.__name__}(PolicyConfig), from {PolicyConfig.__module__}."
        )
    return config


@contextmanager
def own_code(what: str, kind: str) -> Generator[None]:
    """A context for importing a user's `what`, named `kind`, which makes one ScenarioError of whatever its block raises
    or exits with.

    Ctrl-C stays Ctrl-C. What the block prints goes to stderr, and only if it ends well.
    """
    held = _Held(sys.stderr)
    with _watched() as pressed, redirect_stdout(held), redirect_stderr(held):
        try:
            yield
        except ScenarioError:
            raise
        except BaseException as error:
            if pressed:
                raise
            named = f"{what} {kind[:_LETTERS]}{of_package(kind)}"
            raise ScenarioError(f"{named} cannot be imported: {_reason_text(error)}") from None
    held.let_go()


def _reason_text(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}. Is its folder on PYTHONPATH?"
    said = traceback.format_exception_only(error)[-1].strip()  # which an error that cannot be shown does not break
    return f"{said[:_LETTERS]}. Correct its module, or the name."


@contextmanager
def _watched() -> Generator[list[int]]:
    """A list that is not empty once Ctrl-C was really pressed: a user's code can raise KeyboardInterrupt itself."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if callable(before):
            before(number, frame)

    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # in another thread, where no signal arrives
        yield pressed
        return
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class _Held(io.TextIOBase):
    """A stream that keeps what it is given until it is let go, and passes it on from then on."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._texts, self._free = to, list[str](), False

    def write(self, text: str, /) -> int:
        if self._free:
            return self._to.write(text)
        self._texts.append(text)
        return len(text)

    def let_go(self) -> None:
        self._free = True
        self._to.write("".join(self._texts))
