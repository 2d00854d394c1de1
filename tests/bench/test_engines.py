"""The benchmark of engines, with stand-ins for the engines."""

import asyncio
import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch

from dsa_bench.engines import __main__, answers, client, model_process, rows, turns, weights
from dsa_bench.engines.loads import PROMPTS, STEPS, Load, mixed
from dsa_layers import SHIPPED_MODEL


class Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its time goes on when nothing is left to do."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a load. streams[i]: [(seconds, new tokens)] of request i."""
    loop = Loop()
    monkeypatch.setattr(client, "time", Space(perf_counter=loop.time))

    def run_load(load, streams):
        left = iter(streams)

        async def stream(prompt, tokens):
            assert len(prompt) == load.length and tokens == load.tokens
            for seconds, count in next(left):
                await asyncio.sleep(seconds)
                yield count

        return loop.run_until_complete(client.run(Space(vocabulary=99, stream=stream), load, 1))

    yield run_load
    loop.close()


def test_figures_of_requests_that_arrive_together(run):
    """The second request gets two tokens at a time. Its gaps are 1.5, 1.5, 0.5 and 0.5 seconds."""
    figures = run(Load("two", 2, 10, tokens=5), [[(1, 1)] * 5, [(2, 1), (3, 2), (1, 2)]])
    assert figures == pytest.approx(
        {
            "seconds": 6,
            "tokens_per_second": 2 * 14 / 6,
            "first_token_ms": 1500,
            "first_token_ms_99": 2000,
            "between_ms": 1000,
            "between_ms_99": 1500,
            # From 2 s, when both have a token, to 5 s, when one is done, the requests get 3 and 2 tokens.
            "ms_per_step": 3000 / 2.5,
        }
    )


def test_figures_of_requests_that_arrive_one_by_one(run):
    """Times count from a request's arrival."""
    load = Load("three", 3, 10, tokens=2, rate=0.1)
    figures = run(load, [[(0.5, 1), (0.25, 1)]] * 3)
    assert (figures["first_token_ms"], figures["between_ms"]) == pytest.approx((500, 250))
    assert figures["seconds"] == pytest.approx(load.arrivals(1)[-1] + 0.75) and "ms_per_step" not in figures


def test_an_engine_that_generates_other_tokens_is_refused(run):
    with pytest.raises(RuntimeError, match="generated 3 tokens of 2"):
        run(Load("one", 1, 10, tokens=2), [[(1, 1), (1, 2)]])


@pytest.mark.parametrize("load", [*PROMPTS[:3], STEPS[0], mixed(2.5)], ids=lambda load: load.name)
def test_prompts_and_arrivals_follow_from_the_seed(load):
    prompts = [load.prompts(seed, 50) for seed in (1, 2)]
    assert load.prompts(1, 50) == prompts[0] and (prompts[0] == prompts[1]) == load.repeated
    assert [len(prompt) for prompt in prompts[0]] == [load.length] * load.count
    assert {*itertools.chain(*prompts[0])} == {*range(10, 50)}
    times = load.arrivals(1)
    assert len(times) == load.count and times[0] == 0 and times == sorted(times) == load.arrivals(1)
    if load.rate is None:
        assert times[-1] == 0
    else:
        assert times != load.arrivals(2) and 0.5 < times[-1] * load.rate / load.count < 2
    assert Load(**load.fields()) == load


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    """Return a worker's arguments. Its engine is that of engine_stub.py."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; from tests.bench import engine_stub; sys.modules['dsa_bench.engines.stub'] = engine_stub"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return ["stub", str(tmp_path), "100", "1"]


def test_two_processes_take_turns(arguments, tmp_path):
    load = Load("steps", 2, 3, tokens=4)
    with turns.started(arguments, tmp_path) as sides:
        found = turns.run_on_both(sides, load, rounds=2, trace=True)
    # The engine is asked before and after each run. Round 0 is the warm-up, and the last one is traced.
    assert (tmp_path / "turns").read_text() == "1100" + "0011" + "1100" + "0011"
    assert [found[side]["peak_gib"] for side in turns.SIDES] == [5, 5]  # the median of 4 and 6
    assert found["kernels"] == {"alone": [["0", 1.5, 2]], "plugin": [["1", 1.5, 2]]}
    for number, side in enumerate(turns.SIDES):
        assert "writes to standard output" in (tmp_path / f"{side}.log").read_text()
        assert (tmp_path / f"closed {number}").exists()


def test_a_process_that_ends_names_its_log(arguments, tmp_path):
    (tmp_path / "dies").mkdir()
    arguments[1] += "/dies"
    with turns.started(arguments, tmp_path) as sides:
        with pytest.raises(
            RuntimeError, match=rf"the side 'plugin' ended. The end of {tmp_path}/plugin.log:\n.*\nout of memory$"
        ):
            turns.run_on_both(sides, Load("prompts", 1, 3), rounds=1, trace=False)
    assert "out of memory" in (tmp_path / "plugin.log").read_text()


def test_rows(arguments, monkeypatch, tmp_path):
    """A row per load, except those that are there already. The ratio is that of the times."""
    monkeypatch.setattr(
        rows, "all_loads", lambda model: [Load("prompts", 2, 3), Load("steps", 2, 3, tokens=4), mixed(900)]
    )
    monkeypatch.setattr(rows, "SIZES", {"V3.2": rows.Sizes(2, 900)})
    measured = [*rows.rows("stub", ["V3.2"], rounds=1, logs=tmp_path, done=["V3.2, prompts"])]
    assert [row["shape"] for row in measured] == ["V3.2, steps", "V3.2, mixed, 900 requests/s"]
    for row, time in zip(measured, ("ms_per_step", "between_ms"), strict=True):
        assert row["ratio"] == row["alone"][time] / row["plugin"][time] and row["layers"] == 2
    assert measured[0]["figure"] == f"{measured[0]['plugin']['ms_per_step']:.2f} ms a step"
    assert not [*rows.rows("stub", ["V3.2"], only="no such load")]


class Layer(torch.nn.Module):
    """A layer whose weights an engine replaces when it prepares them."""

    def __init__(self, shape=(2, 3, 8)):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.empty(8), requires_grad=False)
        self.quant_method = Space(process_weights_after_loading=self.prepare)

    def prepare(self, layer):
        layer.experts = torch.nn.Parameter(layer.experts.clone(), requires_grad=False)


def test_layers_share_their_large_weights(monkeypatch):
    """Before the engine prepares them, and afterwards. Parameters of other shapes, and small ones, are apart."""
    monkeypatch.setattr(model_process, "LARGE", 4 * 2 * 3 * 8)
    generator = torch.Generator  # there is no GPU
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    with model_process.sharing_parameters():
        layers = torch.nn.ModuleList([Layer(), Layer(), Layer((3, 3, 8))])

    def addresses(name):
        return [getattr(layer, name).data_ptr() for layer in layers]

    assert addresses("experts")[0] == addresses("experts")[1] != addresses("experts")[2]
    assert len({*addresses("norm")}) == 3
    model_process.fill(layers)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    assert addresses("experts")[0] == addresses("experts")[1] != addresses("experts")[2]
    assert 0.1 < layers[0].experts.std() < 0.7 and (layers[2].norm == 0).all()


@pytest.mark.parametrize(
    ("name", "values", "most"),
    [
        ("w13_weight", torch.empty(4, 256, 256, dtype=torch.float8_e4m3fn), 1.0),
        ("w13_weight", torch.empty(4, 256, 128, dtype=torch.uint8), 255),
        ("w13_weight_scale", torch.empty(4, 256, 8, dtype=torch.uint8), 2.0**-5),
        ("weight_scale_inv", torch.empty(2, 4), 0.1),
        ("gate.e_score_correction_bias", torch.empty(256), 0),
        ("hc_attn_scale", torch.empty(3), 1),
        ("gate.tid2eid", torch.empty(100, 6, dtype=torch.int32), 255),
        ("q_a_layernorm.weight", torch.empty(64), 1),
    ],
)
def test_random_weights(name, values, most):
    weights.fill(name, values, torch.Generator().manual_seed(1))
    floats = values
    if name.endswith("scale") and values.dtype == torch.uint8:
        floats = values.view(torch.float8_e8m0fnu)
    floats = floats.float()
    assert floats.isfinite().all() and floats.abs().max() <= most and floats.min() >= -most
    assert most in (0, 1) or len(floats.unique()) > 1 or "scale" in name


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            __main__,
            ["V3.2", "--only", "no such load"],
            "--only: got 'no such load'; the loads are 'prompts 1 x 4096', ",
        ),
        (__main__, ["V3"], "MODEL: got V3; accepted are V3.2, GLM-5, V4-Flash"),
        (__main__, ["--rounds", "0"], "--rounds: must be a whole number of at least 1, got '0'"),
        (__main__, ["--options", "[1]"], "--options: must be a JSON object, got '[1]'"),
        (__main__, ["--options", "{bad"], "--options: must be a JSON object, got '{bad'"),
        (__main__, ["--logs", "/proc/nowhere"], "--logs: [Errno 2]"),
        (answers, ["there", "--ways", "sideways"], "--ways: got sideways; accepted are one by one, "),
        (answers, ["there", "--count", "-1"], "--count: must be a whole number of at least 1, got '-1'"),
        (
            answers,
            [str(SHIPPED_MODEL), "--length", "5000"],
            "--length, --tokens: at most 2047 together, got 5000 and 48",
        ),
        (answers, ["/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_is_not_there_is_refused(capsys, monkeypatch, command, arguments, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(SystemExit) as exit:
        command.main(["vllm", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command", [__main__, answers])
def test_an_engine_that_is_not_installed_is_named(capsys, monkeypatch, command):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["sglang", *(["there"] if command is answers else [])])
    assert "engine: sglang is not installed" in capsys.readouterr().err


def answer_of(tokens, logprob=-1.0, likely=()):
    """`likely` is about every token."""
    return {"logprobs": [logprob], "tokens": [*tokens], "likely": [[*likely] for _ in tokens]}


def test_the_gap_is_that_of_the_first_difference():
    likely = [(1, -0.25), (2, -0.5), (3, -4.0)]
    texts = [answer_of([1, 1, 3], likely=likely), answer_of([1, 2, 1], likely=likely), answer_of([2, 1], likely=likely)]
    others = [answer_of([1, 2, 1]), answer_of([1, 2, 1]), answer_of([2, 3])]
    assert answers.texts(texts[:2], others[:2]) == {"same_text": 0.5, "largest_gap": 0.25}
    assert answers.texts(texts, others) == {"same_text": pytest.approx(1 / 3), "largest_gap": 3.75}
    assert answers.texts(texts[:1], [answer_of([9, 9, 9])]) == {"same_text": 0.0, "largest_gap": 3.75}  # at least
    assert answers.texts(texts, texts) == {"same_text": 1.0, "largest_gap": None}


def test_ways_are_compared_with_the_first_one(monkeypatch, capsys, tmp_path):
    """The plugin's prompt differs by 0.5 from the reference. Together, its second token differs, too."""
    started_with, asked_of = [], []

    class Side:
        def __init__(self, side):
            self.side = side

        def ask(self, asked):
            asked_of.append((self.side, asked["together"], asked["logprobs"]))
            differs = self.side == "plugin" and asked["together"]
            found = answer_of([5, 6 + differs], -1.5 if self.side == "plugin" else -1.0, [(6, -0.7), (7, -0.6)])
            return {"answers": [found if asked["logprobs"] else found | {"logprobs": []}]}

    @contextmanager
    def started(arguments, logs):
        started_with.append(json.loads(arguments[-1]))
        yield [Side("alone"), Side("plugin")]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(answers, "started", started)
    monkeypatch.setattr(answers, "read_config", lambda checkpoint: Space(max_position_embeddings=4096))
    monkeypatch.setattr(answers, "Tokenizer", lambda checkpoint: None)
    monkeypatch.setattr(answers, "held_out_sequences", lambda *given: [[1, 2]])
    monkeypatch.setattr(answers, "reference", lambda *given: [[-1.0]])
    answers.main(["vllm", str(tmp_path), "--ways", "together", "again"])
    every = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    same = {"same_text": 1.0, "largest_gap": None}
    other = {"same_text": 0.0, "largest_gap": pytest.approx(0.1)}
    exact, half = ({"loss": 1 + d, "to_reference": d, "to_alone": 0.0} for d in (0.0, 0.5))
    assert every == [
        {"way": "one by one", "side": "alone"} | exact | same,
        {"way": "one by one", "side": "plugin"} | half | same,
        {"way": "one by one"} | same,
        {"way": "together", "side": "alone"} | exact | same,
        {"way": "together", "side": "plugin"} | half | other,
        {"way": "together", "same_text": 0.0, "largest_gap": pytest.approx(-0.1)},
        {"way": "again", "side": "alone"} | same,
        {"way": "again", "side": "plugin"} | other,
        {"way": "again", "same_text": 0.0, "largest_gap": pytest.approx(-0.1)},
    ]
    base = {"load_format": "auto", "max_model_len": 4096}
    assert started_with == [base | {"enable_prefix_caching": False}, base]
    assert [each for each in asked_of if each[0] == "plugin"] == [
        ("plugin", False, True),
        ("plugin", True, True),
        ("plugin", True, True),
        ("plugin", True, False),
    ]


def test_an_engine_whose_process_ends_is_an_error_in_words(capsys, monkeypatch, tmp_path):
    def rows(*given, **options):
        yield {"shape": "first"}
        raise RuntimeError("the process of the side 'alone' ended")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(__main__, "rows", rows)
    assert __main__.main(["vllm", "V3.2", "--logs", str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert found.out == '{"shape": "first"}\n' and found.err == "the process of the side 'alone' ended\n"
