"""Memory plans (io/gpu_plan.py, printed by `dsa plan`): weights and caches per GPU have the size that a rank stores."""

import json
from types import SimpleNamespace

import pytest
import torch

from dsa_layers import Generator, Ranks, load_model, read_config
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.command import model
from dsa_layers.command.main import main
from dsa_layers.engine.split import copied
from dsa_layers.io.gpu_plan import check_fits, plan, plans
from dsa_layers.io.loading import precision_of
from dsa_layers.models.family import VENDORED
from dsa_layers.models.registry import FAMILIES
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import write_changed_tiny
from tests.layers.parallel.ways import split_by

FLASH = VENDORED / "deepseek_v4_flash_config.json"


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    """A tiny checkpoint that four ranks can split evenly."""
    # The q_b_proj of A.X-K2 has 160 rows per head; a rank needs a multiple of 128 rows.
    heads = 16 if request.param == "axk2" else 8
    wider = {"moe_intermediate_size": 512, "num_attention_heads": heads}
    wider |= {"o_groups": 4} if request.param == "deepseek_v4" else {"num_key_value_heads": heads}
    return write_changed_tiny(tmp_path_factory.mktemp(request.param), request.param, **wider)


def held(tensors):
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("way", "gpus", "drafts"),
    [("queries", 1, 0), ("queries", 2, DRAFTS), ("queries", 4, 0), ("heads", 2, 0), ("heads", 4, DRAFTS)],
)
def test_the_plan_is_what_a_rank_holds(directory, way, gpus, drafts):
    with split_by(way):
        config = read_config(directory)
        drafts = drafts if has_drafter(config.model_type) else 0
        found = plan(config, precision_of(config), gpus, drafter=drafts > 0)
        part = load_model(directory, mesh=Ranks(gpus - 1, gpus), drafter=drafts > 0, progress=False)
        parts = [module.part for module in part.modules() if getattr(module, "part", None) is not None]
        copies = [x for own in parts for x in copied(own)]
        assert found.weights == held([*part.state_dict().values(), *copies])
        assert found.whole == plan(config, precision_of(config), 1, drafter=drafts > 0).weights
        for pages in (3, 70):
            tokens = pages * part.page_size
            generator = Generator(part, cache_tokens=tokens, draft_tokens=drafts)
            caches = generator.passes.caches
            held_in_caches = held(tensor for cache in caches for tensor in cache.tensors())
            assert found.bytes(tokens) == found.weights + held_in_caches == found.bytes(tokens - part.page_size + 1)


@pytest.mark.parametrize(("name", "gpus"), [("deepseek_v32", 8), ("deepseek_v4_flash", 2)])
def test_context_is_what_memory_the_weights_leave(name, gpus):
    config = read_config(VENDORED / f"{name}_config.json")
    for drafter in (False, True):
        found = plan(config, precision_of(config), gpus, drafter=drafter)
        for memory in (141 * 10**9, int(found.bytes(20 * found.page_size + 1) / 0.9) + 2):
            tokens = found.tokens(memory)
            assert tokens and found.bytes(tokens) <= 0.9 * memory < found.bytes(tokens + 1)  # 0.9: gpu_plan.SHARE
        assert tokens == 21 * found.page_size
        assert found.tokens(80 * 10**9) == 0


@pytest.mark.parametrize(
    ("name", "gpus", "size"), [("deepseek_v32", [1, 2, 4, 8, 16], 671e9), ("deepseek_v4_flash", [1, 2, 4, 8], 155e9)]
)
def test_plans_of_published_models_have_their_size_and_hold_a_twentieth_on_every_gpu_at_most(name, gpus, size):
    config = read_config(VENDORED / f"{name}_config.json")
    every = plans(config, precision_of(config), 16)
    found = {gpus: one for gpus, one in every.items() if not isinstance(one, ValueError)}
    assert [*found] == gpus and found[1].whole == pytest.approx(size, rel=0.025)
    assert all(one.weights < (1 / gpus + 0.05) * one.whole for gpus, one in found.items())


def planned(capsys, *options):
    code = main(["plan", *map(str, options)])
    return code, "".join(capsys.readouterr())


def test_the_command_shows_a_plan_for_each_number_of_gpus(capsys):
    code, table = planned(capsys, FLASH, "--memory", "141")
    lines = table.splitlines()
    assert code == 0 and "156.1 GB of weights" in lines[0] and "GPUs of 141 GB" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4", "8", "16"]
    assert lines[6].startswith("  16  do not evenly share the ")
    assert lines[2].endswith("does not fit") and lines[3].split()[1:3] == ["81.8", "GB"]
    assert "GPUs of 139.8 GB" in planned(capsys, FLASH, "--memory", "139.8")[1]


SHARES = "--gpus: 3 do not evenly share the 64 attention heads of layers.0.attn; accepted up to 16: 1, 2, 4, 8"


@pytest.mark.parametrize(
    ("options", "code", "last"),
    [
        (["--gpus", "2", "--memory", "81.5"], 1, "does not fit"),
        (["--memory", "nan"], 2, "--memory: must be a finite number above 0, got nan"),
        (["--gpus", "3"], 2, SHARES),
    ],
)
def test_models_that_do_not_fit_and_wrong_options_fail(capsys, options, code, last):
    found, told = planned(capsys, FLASH, *options)
    assert found == code and last in told.splitlines()[-1]


def test_the_plan_with_drafts_counts_the_drafter_s_layer_and_its_cache(capsys, tmp_path):
    path = VENDORED / "deepseek_v32_config.json"
    code, told = planned(capsys, path, "--memory", "141", "--gpus", "8", "--draft", "3")
    assert code == 0 and ": 685.8 GB of weights with the drafter's, a cache of 48.9 KB a token" in told
    config = read_config(path)
    with_drafter, without = (plan(config, precision_of(config), 8, drafter=drafter) for drafter in (True, False))
    assert int(told.split()[-1]) == with_drafter.tokens(141 * 10**9) - 3 < without.tokens(141 * 10**9)

    (tmp_path / "config.json").write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    told = "dsa plan: --draft: config.json must have num_nextn_predict_layers of at least 1, got 0\n"
    assert planned(capsys, tmp_path, "--draft", "1") == (2, told)


def test_a_cache_that_does_not_fit_is_refused():
    config = read_config(FLASH)
    found, widened = (plan(config, precision_of(config, widen_experts=widen), 2) for widen in (False, True))
    assert 1.7 < widened.weights / found.weights < 2
    check_fits(found, 141 * 10**9, 10**6)
    with pytest.raises(ValueError, match=r"a cache for 20000000 tokens 1\d\d\.\d GB"):
        check_fits(found, 141 * 10**9, 2 * 10**7)


def test_weights_that_do_not_fit_are_refused_before_reading(monkeypatch, capsys):
    gpu = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    monkeypatch.setattr(model, "launch", lambda *call: 0)

    def refused(*options):
        assert main(["generate", str(FLASH), "--prompt", "x", *options]) == 2
        return capsys.readouterr().err

    assert "--gpus: each of 2 would hold 81.8 GB of weights" in refused("--gpus", "2")
    assert "--gpus: must be at most the 2 that torch sees, got 4" in refused("--gpus", "4")
    assert "--gpus: each of 1 would hold 1" in refused()
    gpu.total_memory = 92 * 10**9
    assert "--gpus: each of 2 would hold 83.7 GB of weights" in refused("--gpus", "2", "--draft", "1")
