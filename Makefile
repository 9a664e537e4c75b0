# `make demo` and `make test` need only Python and a package registry; they make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := runs/smollm2-135m-instruct
MINILM := runs/all-minilm-l6-v2
READY := $(VENV)/.installed

.PHONY: demo test test-all test-gpu check docs architectures bench bench-quality bench-c4 bench-c4-targets bench-c4-80 bench-wikitext \
	bench-wikitext-rows bench-qwen bench-paper bench-refined bench-refined-longer bench-refined-stories bench-variants bench-stories \
	bench-structured bench-structured-stories bench-structured-smollm2 bench-structured-defaults \
	bench-structured-speed bench-elsewhere \
	bench-structure-options bench-rivals bench-matching bench-gradient-admm bench-choices bench-texts bench-mixtures \
	bench-demo bench-accumulators bench-speed bench-memory bench-training bench-recovery bench-profiling \
	bench-candidates bench-upcast bench-chat bench-embeddings table clean

demo: $(MODEL)  ## prune a real model to 50% zeros, and to a smaller one, and show what each cost
	$(BIN)/python examples/demo.py --model $(MODEL) --output runs/smollm2-50 --overwrite

bench-demo: $(MODEL)  ## the demo, into the README's table of both
	$(BIN)/python examples/demo.py --model $(MODEL) --output runs/smollm2-50 --overwrite --json benchmarks/results/demo.json

# A worker for each core; a few have all of the gain, and each imports torch and forks processes of its own.
PYTEST := $(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal

test: $(READY)  ## the fast suite
	$(PYTEST)

test-all: $(READY) $(MODEL) $(MINILM)  ## everything: whole grids, more kills, real launchers and real models
	GRADPROBE_SMOLLM2=$(MODEL) GRADPROBE_MINILM=$(MINILM) $(PYTEST) -m ""

test-gpu: $(READY)  ## what is the same on a GPU as on the CPU, where there is one
	GRADPROBE_GPU=1 $(BIN)/pytest tests/test_cuda.py

check: $(READY)  ## lint, format, types, and the pages: what they show is what was measured, and the site builds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.readme_table --check
	$(BIN)/python -m benchmarks.picture --check
	$(MAKE) docs

docs: $(READY)  ## the documentation site, into build/docs; every warning is an error
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --quiet -b html docs build/docs

STORIES ?= $(wildcard ../shared/models/stories15M)
STORIES_TEXT ?= $(wildcard ../shared/data/tinystories.txt)

bench: bench-quality bench-variants $(if $(STORIES),bench-stories bench-texts) $(if $(C4),bench-mixtures) \
	bench-accumulators bench-speed bench-memory bench-training $(if $(STORIES),bench-recovery bench-candidates) bench-profiling table

# PEERS: the Python of an environment that has llm-compressor; see benchmarks/peer.py.
PEERS ?=
# FLAGS: more arguments; --fresh where the results at hand are of other code, text or settings: they are refused
# otherwise. All of these resume cell by cell where they were stopped.
FLAGS ?=
# WikiText-2 from the Hub, or from a folder with calibration.txt (its validation split) and evaluation.txt (test).
WIKITEXT ?= $(wildcard ../shared/data/wikitext-2)
HUB := Salesforce/wikitext:wikitext-2-raw-v1
WIKI_CALIBRATION := $(if $(WIKITEXT),$(WIKITEXT)/calibration.txt,$(HUB):validation)
WIKI_TEST := $(if $(WIKITEXT),$(WIKITEXT)/evaluation.txt,$(HUB):test)
TEXTS := --calibration $(WIKI_CALIBRATION) --evaluation $(WIKI_TEST) pydoc=26
# C4: a file of plain text, of which the first 70% calibrate.
C4 ?= $(wildcard ../shared/data/c4/calibration.txt)
C4_CALIBRATION = --calibration "$(call named,C4)[:70%]"
# The value of a variable that has to be given.
named = $(or $($(1)),$(error $(1) is not set: docs/method.md says under "How to read the tables" what it names))
QUALITY := $(BIN)/python -m benchmarks.quality
SMOLLM2 = $(QUALITY) --model $(MODEL) --blocks-per-step 6 $(if $(PEERS),--peers $(PEERS))
README_ROWS := sparsegpt "two probes" "sparsegpt + admm" "one probe + admm"

bench-quality: bench-c4 bench-c4-targets bench-c4-80 bench-wikitext bench-wikitext-rows bench-qwen bench-paper  ## the tables of perplexity after pruning: days on 2 cores

bench-c4: $(READY) $(MODEL)  ## the main table, calibrated on C4: three draws of the README's rows and Wanda (C4)
	$(SMOLLM2) $(C4_CALIBRATION) --evaluation $(WIKI_TEST) pydoc=26 --seed $(DRAWS) --methods wanda $(README_ROWS) \
		--columns 0.5 0.6 0.7 2:4 4:8 --output benchmarks/results/c4.json $(FLAGS)

bench-c4-targets: $(READY) $(MODEL)  ## SparseGPT a quarter of the way to the dense outputs, on the main table's windows (C4)
	$(SMOLLM2) $(C4_CALIBRATION) --evaluation $(WIKI_TEST) pydoc=26 --seed $(DRAWS) \
		--methods "sparsegpt, dense_target 0.25" --columns 0.5 0.6 0.7 2:4 4:8 \
		--output benchmarks/results/c4-targets.json $(FLAGS)

bench-c4-80: $(READY) $(MODEL)  ## the main table's rows, and SparseGPT at that target, at 80%: one draw (C4)
	$(SMOLLM2) $(C4_CALIBRATION) --evaluation $(WIKI_TEST) pydoc=26 \
		--methods wanda $(README_ROWS) "sparsegpt, dense_target 0.25" --columns 0.8 \
		--output benchmarks/results/c4-80.json $(FLAGS)

ON_WIKITEXT = $(SMOLLM2) $(TEXTS)

bench-wikitext: $(READY) $(MODEL)  ## the same and one probe, calibrated on WikiText-2's validation split
	$(ON_WIKITEXT) --methods wanda "one probe" $(README_ROWS) --columns 0.5 0.6 0.7 2:4 4:8 \
		--output benchmarks/results/wikitext.json $(FLAGS)

bench-wikitext-rows: $(READY) $(MODEL)  ## every other row, llm-compressor's too (PEERS)
	$(ON_WIKITEXT) --output benchmarks/results/wikitext-rows.json $(FLAGS)

REFINED := sparsegpt "sparsegpt + admm + blocks" "sparsegpt + recovery" "sparsegpt + admm + recovery" "one probe + admm" \
	"one probe + admm + blocks" "one probe + admm + recovery" "one probe + admm + blocks + recovery"

bench-refined: $(READY) $(MODEL)  ## blocks trained, and recovery: some hours a column
	$(ON_WIKITEXT) --columns 0.5 0.6 0.7 2:4 4:8 --methods $(REFINED) \
		--output benchmarks/results/refined.json $(FLAGS)

bench-refined-longer: $(READY) $(MODEL)  ## recovery with 2 million tokens, at 60%: hours; it goes on from runs/longer
	$(ON_WIKITEXT) --columns 0.6 --methods "one probe + admm + blocks + recovery, 488 steps" --state runs/longer \
		--output benchmarks/results/refined.json $(FLAGS)

bench-paper: $(READY) $(MODEL)  ## the README's rows at 60% by the protocol of papers: all of WikiText-2's test split
	$(SMOLLM2) $(C4_CALIBRATION) --evaluation paper:$(WIKI_TEST) --columns 0.6 --methods $(README_ROWS) \
		--output benchmarks/results/paper.json $(FLAGS)

QWEN := runs/qwen2.5-coder-0.5b-instruct

bench-qwen: $(READY) $(QWEN)  ## a second model, fewer rows
	$(QUALITY) --model $(QWEN) $(C4_CALIBRATION) --evaluation $(WIKI_TEST)=40 pydoc=24 \
		--methods wanda $(README_ROWS) "sparsegpt, dense_target 0.5" "one probe + admm + blocks" \
		--columns 0.6 --output benchmarks/results/qwen.json $(FLAGS)

bench-variants: $(READY) $(MODEL)  ## other estimates, factors, bounds and scopes
	$(QUALITY) --variants --model $(MODEL) $(TEXTS) $(FLAGS)

SPLIT_STORIES = --calibration "$(call named,STORIES_TEXT)[:70%]" --evaluation "$(STORIES_TEXT)[70%:]"
DRAWS ?= 0 1 2
STORIES15M = $(QUALITY) --model $(call named,STORIES) --dtype float32 $(SPLIT_STORIES) --num-samples 32 --sequence-length 256 \
	--evaluation-samples 48 --blocks-per-step 2

# Without the rows of bench-rivals and bench-refined-stories.
GRID := wanda sparsegpt "sparsegpt + admm" "two probes" "two probes + obs" "two probes + least squares" \
	"two probes + admm" "wanda + obs" "wanda + admm" "one probe" "one probe + obs" "one probe + admm" magnitude \
	"magnitude + obs" random "random + obs" "threshold rule" "threshold rule + obs" rounds "rounds + obs" \
	"rounds + admm" sequential "sequential + obs" "sequential + admm"

bench-stories: $(READY)  ## its rows in every column on a model of 15M (STORIES, STORIES_TEXT, DRAWS)
	$(STORIES15M) --methods $(GRID) --columns 0.5 0.6 0.7 2:4 4:8 --seed $(DRAWS) \
		--output benchmarks/results/stories.json $(FLAGS)

bench-matching: $(READY)  ## settings of block matching, on a part of the text that no other benchmark measures on
	$(BIN)/python -m benchmarks.matching --model $(call named,STORIES) --calibration '$(call named,STORIES_TEXT)[:50%]' \
		--evaluation '$(STORIES_TEXT)[50%:70%]' $(FLAGS)

bench-choices: $(READY)  ## constants and presets beside their neighbours, on the same part
	$(BIN)/python -m benchmarks.choices --model $(call named,STORIES) --calibration '$(call named,STORIES_TEXT)[:50%]' \
		--evaluation '$(STORIES_TEXT)[50%:70%]' $(FLAGS)

EQUALS := wanda "wanda + obs" "wanda + obs, dense_target 0" "wanda + obs, dense_target 0.25" sparsegpt \
	"sparsegpt, dense_target 0.25" "sparsegpt, dense_target 0.5" "two probes" "two probes + obs" \
	"two probes + obs, dense_target 0" "two probes + obs, dense_target 0.25" "sparsegpt + admm" \
	"sparsegpt + admm, dense_target 0" "sparsegpt + admm, dense_target 0.5" "one probe + admm" \
	"one probe + admm, dense_target 0" "one probe + admm, dense_target 0.5"
RIVALS := "sparsegpt, owl" "sparsegpt, budgets of one probe" "sparsegpt + admm, owl" \
	"sparsegpt + admm, budgets of one probe" gblm "wanda, block by block" "wanda, owl" "one probe" "two probes + admm"

REFINED_STORIES := sparsegpt "sparsegpt + blocks" "sparsegpt + recovery" "sparsegpt + admm + blocks" \
	"one probe + admm" "one probe + admm + blocks" "one probe + admm + recovery" "one probe + admm + blocks + recovery"

bench-refined-stories: $(READY)  ## the same training behind SparseGPT and behind one probe, on the model of 15M (DRAWS)
	$(STORIES15M) --seed $(DRAWS) --methods $(REFINED_STORIES) --columns 0.5 0.6 0.7 2:4 \
		--output benchmarks/results/refined-stories.json $(FLAGS)

bench-gradient-admm: $(READY)  ## ADMM in training (ELSA) beside one probe and recovery, at 70, 80 and 90%: hours
	$(BIN)/python -m benchmarks.gradient_admm --model $(call named,STORIES) $(SPLIT_STORIES) --evaluation-samples 48 $(FLAGS)

bench-rivals: $(READY)  ## three draws of the rows that others are compared by, on the model of 15M
	$(STORIES15M) --seed 0 1 2 --methods $(EQUALS) $(RIVALS) --columns 0.5 0.6 0.7 0.8 2:4 \
		--output benchmarks/results/rivals.json $(FLAGS)

bench-structured: $(READY)  ## whole channels, heads and blocks of the model of 15M
	$(BIN)/python -m benchmarks.structured --model $(call named,STORIES) --calibration '$(call named,STORIES_TEXT)[:50%]' \
		--evaluation '$(STORIES_TEXT)[50%:70%]' $(FLAGS)

bench-structure-options: $(READY)  ## damping chosen on held-out batches, and gates in rounds, on the model of 15M
	$(BIN)/python -m benchmarks.structure_options --model $(call named,STORIES) --calibration '$(call named,STORIES_TEXT)[:50%]' \
		--evaluation '$(STORIES_TEXT)[50%:70%]' $(FLAGS)

SMALLER := $(BIN)/python -m benchmarks.structured_quality
CHANNELS := "channels, OBS + least squares" "channels, Fisher + least squares" "channels, OBS x Fisher + least squares"
CHANNELS += "channels, OBS + least squares, half own text" "channels, Fisher + least squares, half own text" \
	"channels, OBS x Fisher + least squares, half own text"

bench-structured-stories: $(READY)  ## ways to make the model of 15M smaller, at equal parameters (STORIES, STORIES_TEXT, DRAWS)
	$(SMALLER) --model $(call named,STORIES) $(SPLIT_STORIES) --columns 0.17 0.33 0.5 --seed $(DRAWS) --sequence-length 256 \
		--output benchmarks/results/structured_stories.json $(FLAGS)

bench-structured-smollm2: $(READY) $(MODEL)  ## the same of SmolLM2-135M, calibrated on C4 (C4)
	$(SMALLER) --model $(MODEL) --dtype bfloat16 $(C4_CALIBRATION) --evaluation $(WIKI_TEST)=16 pydoc=12 \
		--output benchmarks/results/structured_smollm2.json $(FLAGS)

bench-structured-defaults: $(READY) $(MODEL)  ## how channels are chosen best, on four texts of no other table (C4, STORIES_TEXT)
	$(BIN)/python -m benchmarks.docstrings runs/docstrings.txt
	$(SMALLER) --model $(MODEL) --dtype bfloat16 $(C4_CALIBRATION) --columns 0.2 --evaluation $(WIKI_CALIBRATION)=8 \
		"$(call named,STORIES_TEXT)=8" "$(C4)[70%:]=8" runs/docstrings.txt=8 --methods $(CHANNELS) \
		--output benchmarks/results/structured_defaults.json $(FLAGS)

bench-structured-speed: $(READY) $(MODEL)  ## speed, memory and bytes of shapes of SmolLM2-135M beside the dense one
	$(BIN)/python -m benchmarks.structured_speed --model $(MODEL) $(FLAGS)

bench-elsewhere: $(READY)  ## smaller models in llama.cpp, ONNX Runtime and OpenVINO, each in an environment of its own
	$(BIN)/python -m benchmarks.elsewhere --model $(call named,STORIES) $(FLAGS)

bench-texts: $(READY)  ## more calibration text, less of it, and the model's own, on the model of 15M
	$(QUALITY) --texts --seed $(DRAWS) --model $(call named,STORIES) --dtype float32 $(SPLIT_STORIES) \
		--sequence-length 256 --evaluation-samples 48 $(FLAGS)

bench-mixtures: $(READY) $(MODEL)  ## calibration on the model's own text, on others, and on two at once (C4)
	$(BIN)/python -m benchmarks.mixtures --model $(MODEL) --wikitext $(WIKI_CALIBRATION) $(WIKI_TEST) --c4 "$(call named,C4)" $(FLAGS)

TRAIN_TEXT ?= $(if $(WIKITEXT),$(WIKITEXT)/calibration.txt,README.md)

bench-accumulators: $(READY) $(MODEL)  ## what statistics in fewer bytes do to the result
	$(QUALITY) --accumulators --seed 0 1 2 --model $(MODEL) $(TEXTS) $(FLAGS)

bench-memory: $(READY) $(MODEL)  ## peak memory of whole runs, a 7B model's from disk among them (50 GB of disk, hours)
	$(BIN)/python -m benchmarks.memory --model $(MODEL) --large runs/mistral-shaped

bench-speed: $(READY) $(MODEL)  ## time of the probes against bare passes
	$(BIN)/python -m benchmarks.speed --model $(MODEL)

bench-upcast: $(READY) $(MODEL)  ## passes in bfloat16 on this CPU: its own products, and in float32
	$(BIN)/python -m benchmarks.upcast --model $(MODEL)

bench-training: $(READY) $(MODEL)  ## pruning in training: saliencies compared, and what callbacks cost (TRAIN_TEXT)
	$(BIN)/python -m benchmarks.training compare --text $(TRAIN_TEXT)
	$(BIN)/python -m benchmarks.training cost --model $(MODEL) --batch-size 2 --window 256
	$(BIN)/python -m benchmarks.training cost --model $(MODEL) --batch-size 2 --window 256 --compile

bench-recovery: $(READY)  ## training towards the dense model after pruning, and towards the text (STORIES, STORIES_TEXT)
	$(BIN)/python examples/recover.py --model $(call named,STORIES) --split $(call named,STORIES_TEXT) --json benchmarks/results/recovery.json \
		--evaluation wikitext=$(if $(WIKITEXT),$(WIKITEXT)/evaluation.txt,$(HUB):test) $(FLAGS)

bench-profiling: $(READY)  ## what profiling costs, and what each finding is worth in the examples
	$(BIN)/python -m benchmarks.profiling $(FLAGS)

bench-candidates: $(READY)  ## whether a second probe should keep sums of candidates alone (STORIES, STORIES_TEXT)
	$(BIN)/python -m benchmarks.candidate_sums --model $(call named,STORIES) --calibration $(call named,STORIES_TEXT)

SST2 ?= $(wildcard ../shared/data/sst2)

bench-chat: $(READY) $(MODEL)  ## a chat model with an adapter, pruned on its own chats (SST2: a folder; default: the Hub)
	$(BIN)/python examples/chat_adapter.py --model $(MODEL) --output runs/chat --num-samples 8 --test 160 \
		--recovery-steps 30 --json benchmarks/results/chat.json $(if $(SST2),--data $(SST2))

bench-embeddings: $(READY) $(MINILM)  ## an embedding model: what is left of its embeddings, of retrieval, of sentiment (C4, SST2)
	$(BIN)/python -m benchmarks.embeddings --model $(MINILM) --calibration "$(call named,C4)[:70%]" --evaluation "$(C4)[70%:]" \
		--sst2 $(SST2) $(FLAGS)

architectures: $(READY)  ## docs/architectures.md, from a tiny model of each on its way through prune, save, load and pipeline
	$(BIN)/python -m tests.architecture_page
	$(BIN)/python -m tests.structure_page

table: $(READY)  ## write the tables and the picture from benchmarks/results
	$(BIN)/python -m benchmarks.readme_table
	$(BIN)/python -m benchmarks.picture

$(MODEL): | $(READY)
	$(BIN)/python examples/get_smollm2.py $@

$(QWEN): | $(READY)
	$(BIN)/python examples/get_qwen05.py $@

$(MINILM): | $(READY)
	$(BIN)/python examples/get_minilm.py $@

$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,docs]'  # compiled as imported
	touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info
