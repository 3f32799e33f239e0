# Draftstill from nothing but python3 and make. Everything is installed into .venv; your own Python stays as it is.
PYTHON ?= python3
BIN := .venv/bin
# A package index for torch alone. Its default wheel holds CUDA (several GB); without a GPU, the CPU wheel will do:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow bench-decode bench-distill bench-drift bench-evening bench-family bench-gpu bench-losses bench-reading bench-recording bench-respond bench-score bench-training lint docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: .venv/.installed  ## Install Draftstill and its tools into .venv

demo: venv  ## The main job on a real model and real contracts
	$(BIN)/draftstill demo

# Two workers of one thread each: small models gain nothing from a second thread, and the suite takes half the time.
# Passive waiting: beside another busy process, OpenMP's spinning threads run many times slower.
test: venv  ## Run the tests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: venv  ## Run the tests that take minutes, too
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m "not gpu" --timeout 1800

# For example: make bench-decode BENCH=--quick, or BENCH='--draft runs/demo/draft/model'
bench-decode: .venv-bench/.installed  ## Time the decoder against transformers and flashspec: minutes
	PYTHONPATH=.venv-bench $(BIN)/python -m tests.bench.decode $(BENCH)

bench-distill: .venv-bench/.installed  ## Time the fused loss against whole logits, TRL and Liger: 10 minutes
	PYTHONPATH=.venv-bench $(BIN)/python -m tests.bench.distill $(BENCH)

bench-gpu: venv  ## Test and time captured rounds on a CUDA device: 8 minutes
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m tests.bench.gpu $(BENCH)

bench-drift: venv  ## A tuned target and its draft, the paper in miniature: 100 minutes, in pieces (BENCH='--budget-minutes 20')
	$(BIN)/python -m tests.bench.drift $(BENCH)

bench-evening: venv  ## The best draft of an hour, and what each choice is worth: hours, resumable (BENCH=screen, BENCH='general --layers 0 1')
	$(BIN)/python -m tests.bench.evening $(BENCH)

bench-family: venv  ## Qwen2.5-Coder 1.5B, its stock 0.5B draft and tuned ones: 1.6 GB of wheels, hours, in pieces (BENCH='--stop-after recording')
	$(BIN)/python -m tests.bench.family $(BENCH)

bench-losses: venv  ## What each loss makes of the demo's draft, three orders each: resumable
	$(BIN)/python -m tests.bench.losses $(BENCH)

bench-reading: venv  ## Read a 200 MB chat log with broken rows: time and memory
	$(BIN)/python -m tests.bench.reading $(BENCH)

bench-respond: venv  ## Time responding against transformers' generate in batches: minutes
	$(BIN)/python -m tests.bench.respond $(BENCH)

bench-score: venv  ## Score three candidates at four gammas, decode again at the best: 20 minutes
	$(BIN)/python -m tests.bench.score $(BENCH)

bench-training: venv  ## Time the training loop against the bare step: minutes
	$(BIN)/python -m tests.bench.training $(BENCH)

bench-recording: venv  ## Time recording against the bare target, reading against training: minutes
	$(BIN)/python -m tests.bench.recording $(BENCH)

# Types are checked on the built tree: only there do the top-level folders lie where they are imported from.
lint: venv  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/typecheck .
	cd build && MYPYPATH=typecheck ../$(BIN)/mypy --config-file ../pyproject.toml -p draftstill

docs: venv  ## Write docs/recipe.md and the schema that editors complete recipes from
	$(BIN)/draftstill recipe reference > docs/recipe.md
	$(BIN)/draftstill recipe schema > configs/recipe.schema.json

clean:  ## Remove .venv and everything built; runs/ stays
	rm -rf .venv .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Draftstill needs Python 3.11 or newer; this is %d.%d. Give another: make PYTHON=python3.12 ..." % v[:2])'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || { rm -rf .venv; \
	  echo 'python3 -m venv failed. On Debian and Ubuntu: apt install python3-venv (as root), then the same make again.' >&2; exit 1; }
	@echo 'Installing Draftstill, torch and the rest into .venv: several minutes, and up to several GB with CUDA (see TORCH_INDEX in the Makefile).'
	@test -z '$(TORCH_INDEX)' || $(BIN)/python -m pip install -q torch --index-url '$(TORCH_INDEX)'
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@
	@echo 'Installed.'

# The benchmark's peers are no dependency: they lie in a folder of their own, and what they need themselves is in .venv.
.venv-bench/.installed: Makefile .venv/.installed
	@rm -rf .venv-bench
	@$(BIN)/python -m pip install -q --no-deps --target .venv-bench flashspec==0.3.1 trl==1.16.0 liger-kernel==0.8.5
	@echo '*' > .venv-bench/.gitignore
	@touch $@
