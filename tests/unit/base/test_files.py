"""Users' files: what is read, what is refused before it is read, and what a failed writing leaves."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.files import (
    ANY,
    OccupiedError,
    check_folder,
    check_writable,
    json_kind,
    keeping_what_is_read,
    open_file,
    read_bytes,
    read_json,
    read_text,
    replacing,
    write_text,
)
from batchsim.results.point_files import remove_unfinished
from tests.support.paths import ROOT

# ---- reading


def _fifo(path: Path) -> str:
    os.mkfifo(path)
    return "is a FIFO, not a regular file"


def _device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a character device, not a regular file"


def _folder(path: Path) -> str:
    path.mkdir()
    return "is a folder"


def _sparse(path: Path) -> str:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return f"has {1 << 40:,} bytes, at most {100:,} are read"


@pytest.mark.parametrize("make", [_fifo, _device, _folder, _sparse])
@pytest.mark.parametrize("read", [open_file, read_bytes, read_text, read_json])
def test_what_is_no_file_is_refused_before_it_is_read(
    tmp_path: Path, read: Callable[..., Any], make: Callable[[Path], str]
) -> None:
    """A FIFO nobody writes, an endless device, a folder and a file beyond the limit: at once, and in words."""
    said = make(tmp_path / "x")
    with pytest.raises(OSError, match=said) as refused:
        read(tmp_path / "x", 100)
    assert refused.value.filename == str(tmp_path / "x")


def test_a_file_whose_size_is_not_known_is_read_to_the_limit() -> None:
    """Files of /proc say 0 bytes: their size is counted as they are read."""
    with pytest.raises(OSError, match="has 11 bytes, at most 10 are read"):
        read_bytes("/proc/self/stat", 10)
    assert read_text("/proc/self/stat").startswith(str(os.getpid()))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe", r"byte 1 is not UTF-8 text\Z"),
        (b"{", r"not JSON: Expecting .{,80}\Z"),
        (b"[" * 100_000, r"not JSON that is to be read: nested too deeply\Z"),
        (b"1" * 5000, r"not JSON that is to be read: Exceeds the limit .{,80}\Z"),
    ],
    ids=["binary", "cut", "deep", "digits"],
)
def test_what_is_no_json_is_told_in_a_few_words(tmp_path: Path, data: bytes, said: str) -> None:
    """A ValueError whose text does not hold the file."""
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_json(tmp_path / "x")


# ---- writing


def test_a_writing_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The old file stays to the last byte, and nothing lies beside it."""
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyError), replacing(tmp_path / "x") as file:
        file.write(b"new")
        file.flush()
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """What it points to is written, a file that is not there yet too."""
    (tmp_path / "link").symlink_to("to")
    for text in ("one", "two"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "to").read_text() == text


def test_a_device_is_written_and_never_replaced(tmp_path: Path) -> None:
    """/dev/null stays what it is, and /dev/full says what it says."""
    write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space left"):
        write_text("/dev/full", "text")
    assert Path("/dev/full").is_char_device() and not list(Path("/dev").glob(".null*"))


def test_a_name_as_long_as_a_name_may_be_is_written(tmp_path: Path) -> None:
    """The unfinished file's own name is no longer than that."""
    path = tmp_path / ("ü" * 127)
    write_text(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("place", ["file/x", "no/x", "folder", "/proc/x", ""])
def test_a_place_where_no_file_can_be_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Below a file, in no folder, a folder itself, where the kernel keeps its own: an OSError, as writing gives."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    for attempt in (lambda path: check_writable(path, None), lambda path: write_text(path, "")):
        with pytest.raises(OSError):
            attempt(Path(place))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_place_that_will_do_is_left_as_it_was(tmp_path: Path) -> None:
    """Neither the file nor its folder is made by asking."""
    (tmp_path / "x").write_text("old")
    check_writable(tmp_path / "x", ANY)
    check_writable(tmp_path / "y", ANY)
    check_folder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"
    with pytest.raises(NotADirectoryError):
        check_folder(tmp_path / "x" / "b")


# ---- nobody goes around

READERS = {"open", "read_text", "read_bytes", "read_csv", "read_parquet", "read_table", "ParquetFile", "ZipFile"}
READERS |= {"safe_open", "from_file", "fromfile", "loadtxt", "genfromtxt", "memmap", "load"}
WRITERS = {"write_text", "write_bytes", "to_csv", "to_parquet", "savefig", "print_png", "savez", "savez_compressed"}
CALLED = re.compile(rf"\b({'|'.join(sorted(READERS | WRITERS))})\s*\(")
LOADERS = {"json", "yaml", "np", "numpy", "pickle", "torch", "tomllib"}  # whose `load` reads a file
OWN = {
    "batchsim.base.files": "is the way",
    "batchsim.results.provenance.code_hash": "batchsim's own source",
    "batchsim.results.point_files.write_point": "into a folder that is renamed as a whole",
    "batchsim.results.frames.to_frame": "of bytes",
    "batchsim.report.pictures.style._png": "into memory",
    "tools.docs_site.pictures_at_work": "into memory",
    "batchsim.report.page.plan_pictures._svg": "into memory",
    "batchsim.report.page.render.asset": "batchsim's own files, inside its package",
    "batchsim.view.view_server._own": "batchsim's own files, inside its package",
    "batchsim.view.page_data._words": "batchsim's own files, inside its package",
    "batchsim.scenario.command_lines.flags.other_flags": "batchsim's own files, inside its package",
    "batchsim.scenario.described._under_fields": "batchsim's own source",
    "batchsim.scenario.schema.shipped_documents": "batchsim's own files, inside its package",
    "batchsim.explain.counterfactual._scenario": "into a temporary folder of its own",
    "batchsim.cli.common._give_up_stdout": "/dev/null",
    "tools.real_engines.server.running": "what a child prints, as it prints it",
    "tools.real_engines.server._last_words": "what a child printed, in whatever encoding",
    "batchsim.study.sweep.folder_lock.FolderLock.__init__": "a lock, never read as data",
    "batchsim.calibrate.engine.weights.load_weights": "checked first, and mapped by its library",
    "batchsim.calibrate.engine.identity._cpu_name": "the kernel's own file",
    "batchsim.calibrate.engine.footprint._free_bytes": "the kernel's own file",
    "tools.accelerated_wheel": "copies of our own sources, to be compiled",
}


def strays(source: str, module: str) -> list[str]:
    """Calls that read or write a file themselves: `module.function`, line and name of each."""
    if not CALLED.search(source):  # to parse and walk all that batchsim is takes seconds
        return []
    tree = ast.parse(source)
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("batchsim", "tools")
        for alias in node.names
    } | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return list(_strays(tree, module, ours, False))


def _strays(node: ast.AST, where: str, ours: set[str], given: bool) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        where = f"{where}.{node.name}"
    if isinstance(node, ast.With):
        ways = [ast.unparse(item.context_expr) for item in node.items]
        given = given or any(way.startswith(("open_file(", "replacing(")) for way in ways)  # that file is what is meant
    if isinstance(node, ast.Call) and not given:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        own = isinstance(function, ast.Name) and name in ours
        if name in READERS | WRITERS and not own and (name != "load" or owner in LOADERS):
            yield f"{where}:{node.lineno}: {name}"
    for child in ast.iter_child_nodes(node):
        yield from _strays(child, where, ours, given)


def test_every_file_is_read_and_written_through_one_module() -> None:
    """No function but those in OWN, each for its reason, opens a file itself."""
    found: list[str] = []
    for path in sorted(path for folder in ("sim", "calibrate", "tools") for path in (ROOT / folder).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("sim.")
        found += strays(path.read_text(), module if module.startswith("tools.") else f"batchsim.{module}")
    known = [stray for stray in found if any(f"{stray}.".startswith((f"{name}:", f"{name}.")) for name in OWN)]
    assert [stray for stray in found if stray not in known] == []
    assert [name for name in OWN if not any(stray.startswith(name) for stray in known)] == []


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open()",
        "path.read_text()",
        "json.load(file)",
        "pd.read_csv(path)",
        "np.load(path)",
        "gzip.open(path, 'wt')",
        "path.write_text(text)",
    ],
)
def test_a_stray_reader_or_writer_is_noticed(line: str) -> None:
    """Each way to go around; through the module the same name is no stray."""
    assert strays(f"def f(path):\n    {line}", "m") == [f"m.f:2: {line.split('(')[0].split('.')[-1]}"]
    assert strays("from batchsim.base.files import read_text\ndef f(path):\n    read_text(path)", "m") == []
    assert strays("with open_file(path) as file:\n    np.load(file)", "m") == []


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    """Within the context alone, by whatever name; files of batchsim's own folders, which have no Kind, may be."""
    there, link = tmp_path / "x", tmp_path / "y"
    there.write_text("old")
    link.symlink_to(there)
    with keeping_what_is_read():
        assert read_text(there) == "old"
        for path in (there, link):
            with pytest.raises(OccupiedError):
                write_text(path, "new", ANY)
        write_text(there, "older")
        write_text(tmp_path / "z", "new", ANY)
    write_text(there, "new", ANY)
    assert there.read_text() == "new"


def test_a_file_with_the_number_of_one_that_was_read_and_is_gone_may_be_replaced(tmp_path: Path) -> None:
    """File systems give numbers again: a calibration that goes on reads its partial file, replaces it, and may write
    the profile under the number that is free then."""
    partial, profile = tmp_path / "partial", tmp_path / "profile"
    partial.write_text("old")
    with keeping_what_is_read():
        assert read_text(partial) == "old"
        partial.rename(profile)  # as if the number were given again
        partial.write_text("newer")
        write_text(profile, "new", ANY)
    assert (partial.read_text(), profile.read_text()) == ("newer", "new")


def test_every_command_says_what_it_may_replace() -> None:
    """Each file that a command writes where its user says is of a Kind."""
    arguments = {"write_text": 3, "replacing_text": 2, "check_output": 2}
    calls = [
        (path.name, node.func.id, len(node.args))
        for path in sorted((ROOT / "sim" / "cli").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in arguments
    ]
    assert len(calls) > 20
    assert [call for call in calls if call[2] < arguments[call[1]]] == []


def test_only_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """Whole names of batchsim's own; a folder of another's that begins with a dot stays."""
    for name in (".0a1b2c-77", ".old.0a1b2c-77", ".git-backup", ".cache-1x", "0a1b2c"):
        (tmp_path / name).mkdir()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache-1x", ".git-backup", "0a1b2c"]


def test_what_the_shell_opened_is_no_file_to_keep(tmp_path: Path) -> None:
    """/dev/fd/N is written in place, at the end of what is there already: the shell's user asked for that."""
    (tmp_path / "log").write_text("before\n")
    with (tmp_path / "log").open("ab") as file:
        check_writable(f"/dev/fd/{file.fileno()}", json_kind("mine"))
