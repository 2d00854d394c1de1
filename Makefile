# make demo: install into .venv, let the small model of Python source that comes with dsa write some, and the same once
# more with drafts; compare its sparse attention with dense attention on text that it was not trained on.
# make test: install into .venv and run the tests that need no GPU, without most of the slow ones, on a sample of the
# kernels' variants. Both samples are others with every commit.
# make test-all: every test on all variants, and those of the oldest DSL and the oldest transformers that are supported.
# make test-machine: the tests that could depend on the CPU's instructions, on signals or on how processes start.
# make wheel: build dist/ from the last commit: a wheel and a source distribution, with all compiled kernels, of which
# those take seconds each that are not cached; or with those of MODULES alone.
# make docs: the pages of docs/ as a site in build/site.
# make test-wheel: build them, install each into an environment of its own, and run the commands there.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest
DOCS := .venv-docs

.PHONY: demo test test-all test-machine test-oldest test-wheel wheel docs lint format clean
.DELETE_ON_ERROR:

# torch first and pinned: a plain requirement takes a CPU wheel that lies on disk; a range would take the newest CUDA build.
# Byte code is left to the first import: of most modules there is none, and writing it all takes half of the time.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) --editable ".[test]"
	touch $@

DEMO_PROMPT := class Stack:\n    """Last in, first out."""\n\n    def __init__(self, items=()):
demo: .venv/installed
	printf '$(DEMO_PROMPT)' | $(BIN)/dsa generate --prompt - --max-tokens 300 --seed 4
	printf '$(DEMO_PROMPT)' | $(BIN)/dsa generate --prompt - --max-tokens 300 --seed 4 --draft 1 >/dev/null
	$(BIN)/dsa compare

# Tests start hundreds of processes. Where the environment says that byte code is not to be kept, each compiles again
# what it imports; and threads of one would spin while they wait for the cores of another.
unexport PYTHONDONTWRITEBYTECODE
test test-all test-machine test-oldest: export OMP_NUM_THREADS := 1

# Neighbouring tests stay in one process, which makes what they share once; idle processes take from busy ones.
test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-all: lint test-oldest
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 16 --dist worksteal --all

# Numbers: references, parity with transformers, ranks beside one process. Signals and processes: commands and launchers.
ON_ANY_MACHINE := tests/test_conftest.py tests/test_training_example_in_ranks.py tests/reference tests/compat \
	tests/layers/models tests/layers/layers tests/layers/engine tests/layers/command/test_process.py \
	tests/layers/parallel/test_launch.py
test-machine: .venv/installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal -m "not slow" $(ON_ANY_MACHINE)

# The DSL that vLLM and SGLang pin, for machine code and the compile cache.
$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) torch==2.13.0
	$(OLDEST)/bin/python $(PIP_INSTALL) --editable ".[test]" "nvidia-cutlass-dsl[cu13]==4.8.0" apache-tvm-ffi==0.1.11
	touch $@

ON_OLDEST := tests/kernels tests/runtime
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest --numprocesses auto --maxprocesses 16 --dist worksteal --all $(ON_OLDEST)

MODULES ?=
wheel: .venv/installed
	rm -rf build/release dist
	mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	$(BIN)/python -m dsa.runtime.pack build/release/dsa/compiled $(MODULES)
	$(BIN)/python -m build --outdir dist build/release

INSTALLED := build/installed/bin/python
test-wheel: wheel
	rm -rf build/installed
	$(PYTHON) -m venv build/installed
	$(INSTALLED) $(PIP_INSTALL) torch==2.13.0
	$(INSTALLED) $(PIP_INSTALL) dist/*.whl
	$(INSTALLED) -I tests/check_installed.py
	$(INSTALLED) $(PIP_INSTALL) --force-reinstall --no-deps dist/*.tar.gz
	$(INSTALLED) -I tests/check_installed.py

# The requirements of the extra alone: the pages are built without dsa and torch.
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c '$(EXTRA)' | xargs $(DOCS)/bin/python $(PIP_INSTALL)
	touch $@

docs: $(DOCS)/installed
	rm -rf build/site
	$(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -d build/doctrees docs build/site
	@echo build/site/index.html

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv $(OLDEST) $(DOCS) .tiny* build dist *.egg-info
