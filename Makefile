# `make demo` and `make test` are all the set-up there is: each makes .venv if it is missing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 2

# On Linux, PyPI's torch wheel carries several GB of CUDA libraries. Without an NVIDIA driver they are
# dead weight, so PyTorch's own CPU index is consulted; a pip.conf that already offers a CPU wheel works too.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH_INDEX := --extra-index-url $(CPU_INDEX)
endif
endif

.PHONY: help play demo test lint types tests slow bench docs wheel clean
help:
	@echo "make play   a trained model with two dials, in the browser"
	@echo "make demo   five systems and a Transformer learn the built-in stories, and a report (at most 15 minutes)"
	@echo "make test   lint, types, tests with the examples"
	@echo "make slow   the checks that train or time for minutes"
	@echo "make bench  speed against named peers"
	@echo "make docs   the site, into site/"
	@echo "make wheel  sdist and wheel, into dist/"

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "glissando needs Python 3.11 or newer, this is %d.%d" % v[:2])'
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch and the rest into .venv: 2 to 3 GB, some minutes, which pip shows"
	@# torch alone, so that only torch is looked for there; what it needs comes with the rest.
	$(PIP) install --no-deps $(TORCH_INDEX) -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

play: .venv/.installed
	$(BIN)/python -m glissando serve dial --open

demo: .venv/.installed
	@# Small steps, because their number is what counts so early; AdamW, because Muon takes twice as long for so small a step.
	$(BIN)/glissando compare transformer-nano \
	  continuous-transformer-nano minimal-transformer-nano \
	  hybrid-ode-nano tauformer-nano liquid-ssm-nano \
	  --budget tokens=2e5 --allow_unequal --contexts 256,1024 --data.tokenizer bpe --data.seq_len 256 --data.batch_size 1 \
	  --data.valid_rows 32 --training.optimizer.kind adamw --training.optimizer.beta2 0.99 \
	  --training.schedule.warmup_steps 40 --within 900 --out runs/demo

# Types take one core for seconds and tests two for minutes: they run beside each other.
test: lint
	@$(MAKE) --no-print-directory -j 2 types tests

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

tests: .venv/.installed
	@# Their models are too small for threads to pay; processes do. A file stays in one, with what its tests share.
	@# Bytecode is kept even where the environment says otherwise: each process would compile 200 files of tests anew.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

slow: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not serial' --timeout 3600 -n auto --maxprocesses 8 --dist loadfile
	$(BIN)/python -m pytest -m 'slow and serial' --timeout 3600
	@# Laws over cases that were never drawn before.
	HYPOTHESIS_PROFILE=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile \
		$$(grep -rl --include="test_*.py" "from hypothesis import" tests)

bench: .venv/.installed
	$(BIN)/python -m benchmarks

docs: .venv/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 COLUMNS=80 $(BIN)/mkdocs build

wheel: .venv/.installed
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist site *.egg-info
