"""`--jobs`, Ctrl-C and the progress display, from the inside."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
from pathlib import Path

import h5py
import pytest

import utils.jobs
from FLAlgorithms.trainmodel.classifier import Classifier
from tests.test_results import StopAfter, files, read, same
from tests.toys import run_main
from utils import parallel
from utils.config import Config
from utils.errors import InputError
from utils.jobs import Loader, Task, settle
from utils.progress import Interrupts, Progress
from utils.results import result_path


class Threads:
    """Stands in for multiprocessing's context: what a process does is done in a thread."""

    Event = threading.Event

    class Queue(queue.Queue):
        def cancel_join_thread(self) -> None:
            pass

    class Process(threading.Thread):
        exitcode = 0

        def __init__(self, target, args, daemon):
            # Looked up late, so that a test may put something else in its place.
            super().__init__(target=lambda: parallel._work(*args), daemon=daemon)


@pytest.fixture
def tasks(leaf, monkeypatch) -> list[Task]:
    """Two repetitions, for two threads in place of processes."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # for the main thread alone
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: Threads)
    monkeypatch.setattr(parallel, "SECONDS_BETWEEN_NEWS", 0.01)
    build, one = utils.jobs.build_model, threading.Lock()

    def build_alone(*arguments: object, **options: object) -> Classifier:
        # Threads, unlike processes, share the generator that initial models are drawn from.
        with one:
            return build(*arguments, **options)

    monkeypatch.setattr(utils.jobs, "build_model", build_alone)
    words = {"dataset": "Synthetic", "split": str(leaf), "results_dir": str(leaf.parent / "out")}
    config = Config(
        **words, gpu=-1, num_global_iters=3, local_epochs=2, numusers=2, times=2, jobs=2
    )
    config = settle(config, *Loader().data(config))
    return [Task(config, [0]), Task(config, [1])]


def path(task: Task) -> Path:
    """The main result file of a task's only repetition."""
    split = Loader().data(task.config)[1]
    return result_path(task.config, split, False, task.repetitions[0])


def outcome(tasks: list[Task]) -> list[tuple[str, int]]:
    """How every repetition ended, after how many rounds."""
    found = []
    for task in tasks:
        with h5py.File(path(task)) as file:
            found.append((file.attrs["status"], len(file["selected_users"])))
    return found


def waiting(tasks: list[Task]) -> queue.Queue:
    todo = queue.Queue()
    for item in [*enumerate(tasks), None]:
        todo.put(item)
    return todo


def run(tasks: list[Task]) -> int:
    return parallel.run_parallel(tasks, [lambda *_: None] * len(tasks))


def test_a_process_tells_of_every_round_and_of_its_end(tasks):
    news = queue.Queue()
    parallel._work(waiting(tasks), news, threading.Event())
    told = list(news.queue)
    assert [item for item in told if item[0] == "code"] == [("code", 0)] * 2
    shown = [item[1:3] for item in told if item[0] == "show"]
    assert {(0, 3), (1, 3)} <= set(shown)
    assert outcome(tasks) == [("finished", 3)] * 2


def test_a_process_stops_between_rounds_and_keeps_what_it_has(tasks):
    stop = threading.Event()

    class News(queue.Queue):
        def put(self, item):
            super().put(item)
            stop.set()

    parallel._work(waiting(tasks), news := News(), stop)
    assert news.queue[-1] == ("code", 130)
    assert outcome(tasks[:1]) == [("interrupted", 1)]
    assert not path(tasks[1]).exists()


def test_a_process_that_is_told_to_stop_begins_nothing(tasks):
    stop, news = threading.Event(), queue.Queue()
    stop.set()
    parallel._work(waiting(tasks), news, stop)
    assert list(news.queue) == [("code", 130)]
    assert not path(tasks[0]).exists()


@pytest.mark.parametrize("late", [False, True])
def test_bad_input_in_a_process_is_one_error(late, tasks, leaf):
    """A folder that cannot be written any more; data that are gone."""
    if late:
        (leaf / "train" / "all.json").unlink()
    else:
        Path(tasks[0].config.results_dir).write_text("")
    with pytest.raises(InputError, match="expected one" if late else "cannot write"):
        run(tasks)


def test_a_lost_process_is_named(tasks, monkeypatch, capsys):
    monkeypatch.setattr(Threads.Process, "exitcode", -9)
    monkeypatch.setattr(parallel, "_work", lambda *_: None)
    assert run(tasks) == 1
    assert "2 of 2 processes ended with -9, -9" in capsys.readouterr().err


def test_ctrl_c_reaches_every_process(tasks, monkeypatch):
    """As soon as there is news: both stop at the end of their round."""
    listen, shown, calls = parallel.Heard.listen, [], []

    def interrupted(self, news):
        listen(self, news)
        first = bool(shown) and not any(calls)
        calls.append(len(shown))
        if first:
            raise KeyboardInterrupt

    monkeypatch.setattr(parallel.Heard, "listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel.run_parallel(tasks, [lambda *told: shown.append(told)] * 2)
    assert calls[-1] >= 1
    there = [task for task in tasks if path(task).exists()]
    assert there
    for status, rounds in outcome(there):
        assert (status == "finished") == (rounds == 3)


def test_two_processes_give_the_files_of_the_job(tasks, leaf):
    assert run(tasks) == 0
    words = ["--num_global_iters", "3", "--local_epochs", "2", "--times", "2"]
    _, out = run_main(leaf, *words)
    names = [path.name for path in files(out, "*_[01].h5")]
    assert len(names) == 4
    for name in names:
        assert same(read(out / name), read(path(tasks[0]).parent / name)), name


def test_resumed_by_two_processes_is_bitwise_the_same(leaf, tmp_path, monkeypatch, capsys):
    """Repetition 0 stopped after round 2, repetition 1 after round 4; real processes go on."""
    words = ["--algorithm", "SCAFFOLD", "--num_global_iters", "6", "--times", "2"]
    words += ["--semantics", "authors", "--server_learning_rate", "0.5"]
    _, out = run_main(leaf, *words)
    again = tmp_path / "again"
    words += ["--results_dir", str(again)]
    for repetition, rounds in (("0", 2), ("1", 4)):
        with monkeypatch.context() as patch:
            patch.setattr("utils.jobs.Interrupts", lambda rounds=rounds: StopAfter(rounds))
            assert run_main(leaf, *words, "--repetition", repetition)[0] == 130
    assert len(files(again, "*.ckpt")) == 2
    assert run_main(leaf, *words, "--resume", "--jobs", "2")[0] == 0
    names = [path.name for path in files(out, "*")]
    assert names == [path.name for path in files(again, "*")]
    for name in names:
        assert same(read(out / name), read(again / name)), name
        with h5py.File(again / name) as file:
            assert file.attrs["status"] == "finished"


# ---- Ctrl-C and the display


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent otherwise on Windows")
def test_a_second_ctrl_c_does_not_wait(capsys):
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.pause()
        os.kill(os.getpid(), signal.SIGINT)
        assert "stopping at the end of this round" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            interrupts.pause()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_repetitions_share_the_bar_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress("job", 8)
    progress.show(0, "", 1, "test accuracy 0.1000")
    progress.show(1, "", 2, "test accuracy 0.2000")
    assert progress.bar.n == 3
    progress.show(0, "FedAvg", 4, "test accuracy 0.3000")
    progress.close()
    assert "6/8" in (err := capsys.readouterr().err)
    assert "FedAvg, test accuracy 0.3000" in err
