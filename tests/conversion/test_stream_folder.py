"""Several processes share a conversion over the disk; one that fails or dies is noticed by the others."""

import shutil
import signal
import threading
import time

import pytest

from gblr.atomic import appearing, write_json
from gblr.conversion import streaming
from gblr.conversion.checkpoint import from_pretrained
from gblr.conversion.stream_folder import CLAIM, WORK, OtherConversion, StreamFolder, read_json
from gblr.conversion.streaming import convert_streaming
from tests.conversion.streamed import CONFIGS, make_batches, run_together, write_llama


def test_two_processes_share_the_layers_and_give_the_same_bits(tmp_path):
    source = write_llama(tmp_path / "source")
    assert run_together(source, tmp_path / "out", "low rank", "cal", processes=2) == [0, 0]
    convert_streaming(source, tmp_path / "expected", CONFIGS["low rank"], calibration=make_batches())
    for file in (tmp_path / "expected").iterdir():
        if file.name != CLAIM:
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (tmp_path / "out" / WORK).exists()


def test_when_one_of_two_is_killed_the_run_ends_and_can_be_continued_by_one(tmp_path):
    source = write_llama(tmp_path / "source")
    codes = run_together(source, tmp_path / "out", "low rank", "cal", processes=2, KILL="2", KILL_RANK="1")
    assert codes == [1, -signal.SIGKILL] and (tmp_path / "out" / WORK).is_dir()
    convert_streaming(source, tmp_path / "out", CONFIGS["low rank"], calibration=make_batches())
    assert from_pretrained(tmp_path / "out").config.hidden_size == 32


def folder(tmp_path, rank, world=2, timeout=0.3):
    made = StreamFolder(tmp_path / "out", rank, world, timeout)
    made.work.mkdir(parents=True, exist_ok=True)
    return made


def test_a_silent_process_is_taken_for_dead(tmp_path):
    with pytest.raises(RuntimeError, match=r"process 1 of 2 has given no sign of life for 0\.3 seconds.*Start all"):
        folder(tmp_path, 0).wait(lambda: False, "layers")


def test_a_failed_process_is_named_with_its_error(tmp_path):
    first, second = folder(tmp_path, 0, timeout=10), folder(tmp_path, 1)
    time.sleep(0.02)
    with pytest.raises(MemoryError), second.at_work():
        raise MemoryError("no more")
    with pytest.raises(RuntimeError, match="process 1 failed: MemoryError: no more"):
        first.wait(lambda: False, "layers")


def test_a_failure_of_an_earlier_run_is_forgotten(tmp_path):
    write_json(folder(tmp_path, 1).work / "failed-1.json", {"error": "long ago"})
    time.sleep(0.02)
    first = folder(tmp_path, 0)
    with pytest.raises(RuntimeError, match="no sign of life"):
        first.wait(lambda: False, "layers")


def test_a_slow_process_that_lives_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("gblr.conversion.stream_folder._BEAT", 0.05)
    first, second = folder(tmp_path, 0), folder(tmp_path, 1)
    ready = threading.Event()

    def work():
        with second.at_work():
            time.sleep(0.8)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    first.wait(ready.is_set, "layers")
    thread.join()


def test_a_claim_that_another_process_is_writing_is_no_other_file(tmp_path):
    second = folder(tmp_path, 1)
    with appearing(second.out / CLAIM) as new:
        new.write_text("{")
        assert second.check({"config": "a"}) is None
        new.write_text('{"claim": {"config": "a"}}')
    second.claim({"config": "a"})


@pytest.mark.parametrize(("calibrated", "blind"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_a_process_that_is_late_finds_the_run_finished(calibrated, blind, tmp_path, monkeypatch):
    """It saw the folder of a stopped run, which the first process has ended since; or, some times, not even that."""
    source, batches = write_llama(tmp_path / "source"), make_batches() if calibrated else None
    done = convert_streaming(source, tmp_path / "out", CONFIGS["low rank"], calibration=batches)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check, is_done, times = StreamFolder.check, streaming._Conversion._is_done, iter(range(blind))
    monkeypatch.setattr(StreamFolder, "check", lambda self, claim: {"claim": check(self, claim)["claim"]})
    monkeypatch.setattr(streaming._Conversion, "_is_done", lambda *args: next(times, None) is None and is_done(*args))
    late = convert_streaming(source, tmp_path / "out", CONFIGS["low rank"], calibration=batches, timeout=1.0)
    assert list(late) == list(done) and not (tmp_path / "out" / WORK).exists()


def test_a_last_sign_of_life_does_not_keep_the_work_folder(tmp_path, monkeypatch):
    first, removals = folder(tmp_path, 0), []
    remove = shutil.rmtree

    def disturbed(path, ignore_errors):
        remove(path)
        if not removals:
            path.mkdir()
            (path / "alive-1").write_text("x")
        removals.append(path)

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    first.remove_work()
    assert len(removals) == 2 and not first.work.exists()


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(OtherConversion, match=r"not empty \(thesis\.tex\)"):
        StreamFolder(tmp_path / "out", 0, 1, 1.0).claim({"config": "a"})
    with pytest.raises(OtherConversion, match="is a file"):
        StreamFolder(tmp_path / "out" / "thesis.tex", 0, 1, 1.0).check({"config": "a"})


def test_a_file_that_was_not_finished_does_not_appear(tmp_path):
    with pytest.raises(ZeroDivisionError), appearing(tmp_path / "x.json") as new:
        new.write_text("{")
        raise ZeroDivisionError
    assert read_json(tmp_path / "x.json") is None and list(tmp_path.iterdir()) == []
