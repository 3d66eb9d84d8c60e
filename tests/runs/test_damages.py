"""Every damage to a run's folder is named, or does not change the result; none is a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.damages import COMMANDS, DAMAGES, Base, make_base, try_damage

#: Damages without an effect: `motley resume` ends bit-identical and says nothing.
HARMLESS = (
    "config: a comment added",
    "config: line ends of windows",
    "metrics: incomplete line of a round that was not saved",
    "metrics: line ends of windows",
    "checkpoints: oldest lost",
    "checkpoints: a copy beside them",
    "checkpoints: an unfinished one",
    "checkpoints: a file among them",
    "lock: missing",
    "lock: not empty",
    "data: compressed, same values",
    "plugins: a folder",
)
#: What `motley resume` says.
RESUME = {
    "config: missing": "is not a run: there is no config.toml in it.",
    "config: empty": "data.name = 'digits': rounds 1 to 4 ran with 'npz",
    "config: truncated": "is not valid TOML",
    "config: garbage": "config.toml: cannot be read: ",
    "config: not utf-8": "config.toml: cannot be read: ",
    "config: a folder": "Is a directory",
    "config: seed edited": "seed = 2: rounds 1 to 4 ran with 1",
    "config: lr edited": "training.optimizer.lr = 0.01: rounds 1 to 4 ran with 0.001",
    "config: method edited": "method.name = 'fedavg': rounds 1 to 4 ran with 'scaffold'",
    "config: sizes edited": "model.sizes = ['mlp1', 'mlp3']: rounds 1 to 4 ran with ['mlp1', 'mlp2']",
    "config: clients per round edited": "federation.clients_per_round = 2: rounds 1 to 4 ran with 3",
    "config: ema decay edited": "server.ema_decay = 0.9: rounds 1 to 4 ran with 0.5",
    "config: steps edited": "training.steps = 3: rounds 1 to 4 ran with 2",
    "config: checkpoint_every edited": "was changed after round 4: run.checkpoint_every = 2 (it was 1)",
    "config: evaluation edited": "was changed after round 4: evaluation.last_k = 3 (it was 5",
    "config: unknown key": "seeds = 3: unknown key 'seeds",
    "config: wrong type": "training.rounds = 'four': should be a valid integer",
    "config: table for a number": "training.rounds: should be a valid integer.",
    "config: negative rounds": "training.rounds = -4: should be greater than or equal to 1.",
    "config: huge number": "seed = 1000000000000000000000000000000: should be below 2^63.",
    "config: infinite lr": "training.optimizer.lr = inf: should be a finite number.",
    "config: nan lr": "training.optimizer.lr = nan: should be a finite number.",
    "config: markup in a name": "data.name: unknown data set '[red]",
    "config: closing markup in a name": "method.name: unknown method '[/]",
    "config: markup in the preset": "was changed after round 4: preset = '[/]' (it was 'digits-small')",
    "config: deep array": "nested too deeply",
    "config: null characters": "is not valid TOML",
    "config: path with a null character": "was changed after round 4: data.path = ",
    "metrics: missing": "the lines of 4 rounds are missing: 1, 2, 3, 4",
    "metrics: empty": "the lines of 4 rounds are missing: 1, 2, 3, 4",
    "metrics: garbage": "the lines of 4 rounds are missing: 1, 2, 3, 4",
    "metrics: a folder": "cannot be read: Is a directory.",
    "metrics: first line lost": "the line of round 1 is missing",
    "metrics: middle line lost": "the line of round 3 is missing",
    "metrics: last line lost": "the line of round 4 is missing",
    "metrics: line doubled": "line 3: these are not the metrics of a round: round: is 2, after a line",
    "metrics: last line doubled": "line 5: these are not the metrics of a round: round: is 4, after a line",
    "metrics: lines swapped": "line 2: these are not the metrics of a round: round: is 1, after a line",
    "metrics: accuracy edited": "a line of rounds 1 to 4 was changed after it was written",
    "metrics: accuracy of the last line edited": "a line of round 4 was changed after it was written",
    "metrics: round edited": "line 3: these are not the metrics of a round: round: is 3, after a line",
    "metrics: negative round": "line 1: these are not the metrics of a round: round: input should be gre",
    "metrics: round is true": "line 1: these are not the metrics of a round: round: input should be a v",
    "metrics: bytes edited": "a line of rounds 1 to 4 was changed after it was written",
    "metrics: {}": "line 2: these are not the metrics of a round: round: field required",
    "metrics: null": "line 2: these are not the metrics of a round: not a JSON object",
    "metrics: a list": "line 2: these are not the metrics of a round: not a JSON object",
    "metrics: blank line": "line 2: these are not the metrics of a round: not JSON",
    "metrics: deep line": "line 2: these are not the metrics of a round: not JSON",
    "metrics: deep last line": "line 5: these are not the metrics of a round: not JSON",
    "metrics: deep value": "line 2: these are not the metrics of a round: not JSON",
    "metrics: NaN": "line 2: these are not the metrics of a round: accuracy.mlp1: input shoul",
    "metrics: Infinity": "line 2: these are not the metrics of a round: accuracy.mean: input shoul",
    "metrics: -Infinity in seconds": "line 2: these are not the metrics of a round: seconds.train: input shoul",
    "metrics: NaN loss": "line 2: these are not the metrics of a round: train_loss: input should b",
    "metrics: huge integer": "line 2: these are not the metrics of a round: bytes.down: input should b",
    "metrics: a number of 5,000 digits": "line 2: these are not the metrics of a round: not JSON",
    "metrics: huge round": "line 4: these are not the metrics of a round: round: input should be les",
    "metrics: clients a text": "line 2: these are not the metrics of a round: clients: input should be a",
    "metrics: accuracy a list": "line 2: these are not the metrics of a round: accuracy: input should be",
    "metrics: accuracy empty": "a line of rounds 1 to 4 was changed after it was written",
    "metrics: loss a text": "line 4: these are not the metrics of a round: loss: input should be a va",
    "metrics: train_loss a list": "line 4: these are not the metrics of a round: train_loss: input should b",
    "metrics: class_accuracy a number": "line 4: these are not the metrics of a round: class_accuracy: input shou",
    "metrics: class_accuracy of texts": "line 4: these are not the metrics of a round: class_accuracy.mlp1.0: inp",
    "metrics: epsilon a text": "line 4: these are not the metrics of a round: epsilon: input should be a",
    "metrics: client_scores empty": "line 4: these are not the metrics of a round: client_scores.metric: fiel",
    "metrics: client_scores without numbers": "line 4: these are not the metrics of a round: client_scores.metric: fiel",
    "metrics: client_scores of texts": "line 4: these are not the metrics of a round: client_scores.mean: input",
    "metrics: refused a number": "line 4: these are not the metrics of a round: refused: input should be a",
    "metrics: repeated a number": "line 4: these are not the metrics of a round: repeated: input should be",
    "metrics: idle a text": "line 4: these are not the metrics of a round: idle: input should be a va",
    "metrics: metric a text": "line 4: these are not the metrics of a round: metric: input should be a",
    "metrics: markup in a size": "a line of rounds 1 to 4 was changed after it was written",
    "metrics: markup in a metric": "a line of round 4 was changed after it was written",
    "metrics: last line truncated": "the line of round 4 is missing",
    "metrics: not utf-8": "line 1: these are not the metrics of a round: not UTF-8",
    "metrics: byte order mark": "line 1: these are not the metrics of a round: not JSON",
    "client scores: missing": "4 of 4 lines are missing",
    "client scores: empty": "4 of 4 lines are missing",
    "client scores: garbage": "3 of 4 lines are missing",
    "client scores: a folder": "cannot be read: Is a directory.",
    "client scores: line lost": "1 of 4 lines are missing",
    "client scores: line doubled": "a line of rounds 1 to 4 was changed after it was written",
    "client scores: score edited": "a line of rounds 1 to 4 was changed after it was written",
    "client scores: null": "a line of rounds 1 to 4 was changed after it was written",
    "client scores: deep": "a line of rounds 1 to 4 was changed after it was written",
    "client scores: last line a list": "line 5: these are not the scores of clients: not a JSON object",
    "client scores: lists of unlike lengths": "a line of round 4 was changed after it was written",
    "server: missing": "server.json: No such file or directory",
    "server: empty": "server.json: ",
    "server: truncated": "server.json: ",
    "server: garbage": "server.json: ",
    "server: not utf-8": "server.json: ",
    "server: a folder": "server.json: Is a directory",
    "server: deep": "server.json: its values are nested too deeply",
    "server: null": "server.json: it is not a JSON object",
    "state: missing": "state.safetensors: No such file or directory",
    "ema: missing": "ema.safetensors: No such file or directory",
    "method_state: missing": "method_state.safetensors: No such file or directory",
    "stage-optimizer: missing": "stage-optimizer.safetensors: No such file or directory",
    "client_state_rounds: missing": "client_state_rounds.safetensors: No such file or directory",
    "state: a folder": "state.safetensors: Is a directory",
    "checkpoints: a file": "is a file; it should be the folder of the run's checkpoints",
    "checkpoints: newest is a file": "server.json: Not a directory",
    "checkpoints: newest is empty": "server.json: No such file or directory",
    "checkpoints: all lost": "has no checkpoint, but metrics.jsonl has 4 rounds",
    "checkpoints: newest under another number": "it is about round 4",
    "checkpoints: all damaged": "round-000004: state.safetensors: its checksum is wrong",
    "run: a file": "is not a run: there is no config.toml in it.",
    "run: empty": "is not a run: there is no config.toml in it.",
    "lock: a folder": "cannot be written: Is a directory.",
    "client states: all lost": "the state of client 0 after round 4 is missing",
    "client states: one lost": "the state of client 0 after round 4 is missing",
    "client states: under another round": "the state of client 0 after round 4 is missing",
    "client states: content empty": "the state of client 0 after round 4 is missing",
    "client states: content a text": "the state of client 0 after round 4 is damaged",
    "client states: content a number": "the state of client 0 after round 4 is damaged",
    "client states: table lost": "the state of client 0 after round 4 is missing",
    "client states: another table": "the state of client 0 after round 4 is missing",
    "client states: bit flipped": "the state of client 0 after round 4 is damaged",
    "client states: of two clients exchanged": "the state of client 0 after round 4 is damaged",
    "client states: file missing": "the state of client 0 after round 4 is missing",
    "client states: file empty": "the state of client 0 after round 4 is missing",
    "client states: file truncated": "client_states.sqlite cannot be opened: database disk image is malformed",
    "client states: file garbage": "client_states.sqlite cannot be opened: file is not a database",
    "client states: file a folder": "client_states.sqlite cannot be opened: Is a directory",
    "client states: folder a file": "the state of client 0 after round 4 is missing",
    "client states: folder lost": "the state of client 0 after round 4 is missing",
    "data: one label changed": "the training examples",
    "data: one pixel changed": "the training examples are not those of rounds 1 to 4",
    "data: one test label changed": "the test examples are not those of rounds 1 to 4",
    "data: other order": "the training examples",
    "data: fewer examples": "the training examples",
    "data: missing": "there is no file",
    "data: truncated": "data.npz",
}
#: Damages of the newest checkpoint that its checksums notice.
CHECKSUM = (
    "server: round edited",
    "server: round huge",
    "server: round NaN",
    "server: round infinite",
    "server: round a text",
    "server: section lost",
    "server: sections of the method lost",
    "server: section added",
    "server: section outside",
    "server: sections a number",
    "server: ledger a list",
    "server: ledger edited",
    "server: seed in its configuration edited",
    "server: configuration a number",
    "server: configuration lost",
    "state: empty",
    "state: truncated",
    "state: garbage",
    "ema: empty",
    "ema: truncated",
    "ema: garbage",
    "method_state: empty",
    "method_state: truncated",
    "method_state: garbage",
    "stage-optimizer: empty",
    "stage-optimizer: truncated",
    "stage-optimizer: garbage",
    "client_state_rounds: empty",
    "client_state_rounds: truncated",
    "client_state_rounds: garbage",
    "client_state_rounds: client's round edited",
    "client_state_rounds: a client lost",
    "client_state_rounds: unknown client",
    "state: bit flipped",
    "state: NaN",
    "state: infinite",
    "state: other dtype",
    "state: half precision",
    "state: other shape",
    "state: extra tensor",
    "state: tensor lost",
    "ema: bit flipped",
    "ema: NaN",
    "ema: infinite",
    "ema: other dtype",
    "ema: half precision",
    "ema: other shape",
    "ema: extra tensor",
    "ema: tensor lost",
    "method_state: bit flipped",
    "method_state: NaN",
    "method_state: infinite",
    "method_state: other dtype",
    "method_state: half precision",
    "method_state: other shape",
    "method_state: extra tensor",
    "method_state: tensor lost",
    "stage-optimizer: bit flipped",
    "stage-optimizer: NaN",
    "stage-optimizer: infinite",
    "stage-optimizer: other dtype",
    "stage-optimizer: half precision",
    "stage-optimizer: other shape",
    "stage-optimizer: extra tensor",
    "stage-optimizer: tensor lost",
    "state: header longer than the file",
    "state: exchanged with the EMA",
    "state: of an older checkpoint",
)
#: What `motley show` says. These do not change what a resumed run computes.
SHOW = {
    "config: rounds edited": "was changed after round 4: training.rounds = 7 (it was 4).",
    "config: fewer rounds than were run": "was changed after round 4: training.rounds = 2 (it was 4).",
    "environment: missing": "environment.json",
    "environment: empty": "environment.json",
    "environment: truncated": "environment.json",
    "environment: garbage": "environment.json",
    "environment: not utf-8": "environment.json",
    "environment: a folder": "environment.json",
    "environment: deep": "environment.json",
    "environment: a list": "environment.json",
    "environment: other types": "environment.json",
    "environment: markup": "environment.json",
    "plugins: deep": "was changed after the run wrote it.",
    "plugins: other types": "was changed after the run wrote it.",
}
#: What `motley export` says.
EXPORT = {
    "checkpoints: newest lost": "is of round 3, and metrics.jsonl goes on to round 4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damages")


@pytest.fixture(scope="module")
def base(folder: Path) -> Base:
    return make_base(folder)


def _cases() -> list[tuple[str, str, str]]:
    """Return (damage, command, part of the message; empty: harmless)."""
    cases = [(name, "resume", "") for name in HARMLESS]
    cases += [(name, "resume", text) for name, text in RESUME.items()]
    for name in CHECKSUM:
        section = name.partition(":")[0]
        file = "server.json" if section == "server" else f"{section}.safetensors"
        cases.append((name, "resume", f"{file}: its checksum is wrong"))
    cases += [(name, "show", text) for name, text in SHOW.items()]
    cases += [(name, "export", text) for name, text in EXPORT.items()]
    return cases


def test_the_table_is_complete() -> None:
    assert sorted(DAMAGES) == sorted(name for name, _, _ in _cases())


@pytest.mark.parametrize(("name", "command", "text"), _cases(), ids=lambda word: word)
def test_a_damage_is_named_or_harmless(
    base: Base, folder: Path, name: str, command: str, text: str
) -> None:
    verdict = try_damage(name, command, base, folder)
    if not text:
        assert verdict.kind == "harmless", verdict
        return
    assert verdict.kind == "named", verdict
    assert text in verdict.answer.err
    if command == "resume" and verdict.answer.code == 0:
        assert verdict.same, "a run that continues from an older checkpoint ends bit-identical"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_silent_or_fails_with_a_traceback(
    base: Base, folder: Path, command: str
) -> None:
    kinds = {name: try_damage(name, command, base, folder).kind for name in DAMAGES}
    assert [name for name, kind in kinds.items() if kind in ("silent", "traceback")] == []
