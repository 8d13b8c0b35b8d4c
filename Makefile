# The few commands of this repository. `make` alone lists them.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build shim install deb package-files release release-check installer-image manifests \
	demo parity test test-unprivileged test-node check fmt lint doc deny advisories machete parts \
	unit lts \
	releases test-shim-alone conformance test-kubernetes test-kubernetes-vm chart fuzz \
	fuzz-short soak test-deb test-vm test-arm64 \
	mutants prepare tools bench bench-quick budget compare clean

CARGO ?= cargo
# Installs a tool in little time: unoptimised, without debug information, and each crate that
# several tools need only once.
INSTALL = CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=target/tools/build $(CARGO) install
PREFIX ?= /usr/local
SHIM := pause-sandboxer-runc-shim
# The target of the pods' shim: musl where it is installed, or else glibc; the program is static
# with both.
SHIM_TARGET ?= $(shell musl=$$(uname -m)-unknown-linux-musl; \
	if [ -d "$$(rustc --print target-libdir --target $$musl)" ]; then echo $$musl; \
	else echo $$(uname -m)-unknown-linux-gnu; fi)
DENY_VERSION := 0.20.2
DENY := target/tools/bin/cargo-deny
MACHETE_VERSION := 0.9.2
MACHETE := target/tools/bin/cargo-machete
MUTANTS_VERSION := 27.1.0
CARGO_MUTANTS := target/tools/bin/cargo-mutants
DEB_VERSION := 3.8.0
DEB := target/tools/bin/cargo-deb
RPM_VERSION := 0.21.1
RPM := target/tools/bin/cargo-generate-rpm
CYCLONEDX_VERSION := 0.5.9
CYCLONEDX := target/tools/bin/cargo-cyclonedx
RUST_SHIM_VERSION := 0.2.0
RUST_SHIM := target/tools/bin/containerd-shim-runc-v2-rs
NERDCTL_VERSION := 2.2.1
HELM_VERSION := 3.22.0
HELM := target/tools/bin/helm
# Where `make installer-image` writes.
IMAGES ?= target/image
# Architectures of a release; the machine's own must be among them.
ARCHES ?= amd64 arm64
# containerd's long-term release, and the newest of the other releases that nodes run.
LTS ?= 2.3.7
RELEASES := 2.0.14 2.1.9 2.4.2
# The releases of `make test-shim-alone`.
ALONE ?= $(LTS) 2.1.9 2.4.2
# The release whose kubelet and control plane `make test-kubernetes` runs; KUBERNETES=1.36.4 is
# another.
KUBERNETES ?= 1.37.2
# The releases of `make compare`, and the pods of its churn.
COMPARE ?= $(LTS) 2.4.2
PODS ?= 10000
# Sources that `make mutants` puts faults into.
MUTANTS ?= src/podsandbox/machine.rs src/exit.rs src/podsandbox/record.rs \
	src/podsandbox/validate.rs src/podsandbox/validate/*.rs src/cgroup/*.rs src/process/*.rs \
	$(addprefix runc-shim/src/,container/state.rs container/step.rs exits.rs)
SHARD ?= 0/1
# The program that runs `make budget`, with its arguments.
WITH ?=
# The version of critest and crictl, and the releases that `make conformance` runs it on.
CRI_TOOLS := 1.37.0
CONFORMANCE ?= $(LTS)

help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: shim ## the daemon and the pods' shim, optimised, in target/release
	$(CARGO) build --release --locked

# Static and at a fixed address, so that the pods' shims share nearly all of their pages.
shim: ## the pods' shim alone; without the musl target of rustup it links with glibc
	RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" \
		$(CARGO) build --locked --profile shim --target $(SHIM_TARGET) -p $(SHIM)
	install -D -m 0755 target/$(SHIM_TARGET)/shim/$(SHIM) target/release/$(SHIM)
	@case $(SHIM_TARGET) in *-gnu) echo "shim: linked with glibc: each pod takes about 0.15 MB more" \
		"than with musl; rustup target add $$(uname -m)-unknown-linux-musl" >&2 ;; esac

install: build ## copy both to PREFIX/bin (default /usr/local)
	install -D -m 0755 target/release/$(SHIM) $(DESTDIR)$(PREFIX)/bin/$(SHIM)
	install -D -m 0755 target/release/pause-sandboxer $(DESTDIR)$(PREFIX)/bin/pause-sandboxer

# Without dpkg-shlibdeps cargo-deb only warns, and the package depends on no libc.
deb: ## the Debian package: target/debian/pause-sandboxer_VERSION_ARCH.deb
	@command -v dpkg-shlibdeps >/dev/null || \
		{ echo "make deb: dpkg-shlibdeps is missing: apt install dpkg-dev" >&2; exit 1; }
	@command -v cc >/dev/null || \
		{ echo "make deb: a C compiler is missing, to link with: apt install gcc" >&2; exit 1; }
	$(MAKE) build $(DEB) package-files
	$(DEB) --no-build --locked --deb-revision 1

# The files that the binary writes about itself, for the package.
package-files: build ## manual pages and shell completions, in target/package
	packaging/debian/generate target/release/pause-sandboxer target/package

$(DEB):
	$(INSTALL) --debug --locked --root target/tools --version $(DEB_VERSION) cargo-deb

release: $(DEB) $(RPM) $(CYCLONEDX) ## all files of a release, in target/dist; needs root
	ARCHES="$(ARCHES)" packaging/release/build target/dist

release-check: $(DEB) $(RPM) $(CYCLONEDX) ## build the release from two clones and compare the files
	ARCHES="$(ARCHES)" packaging/release/check

installer-image: ## the installer's image, an OCI archive in target/image; needs root
	packaging/release/programs $(ARCHES)
	mkdir -p $(IMAGES)
	packaging/kubernetes/installer-image $(IMAGES)/pause-sandboxer-installer $(ARCHES)

manifests: $(HELM) ## the RuntimeClass for nodes with the package, from the Helm chart
	packaging/kubernetes/generate $(HELM)

$(RPM):
	$(INSTALL) --debug --locked --root target/tools --version $(RPM_VERSION) \
		cargo-generate-rpm

$(CYCLONEDX):
	$(INSTALL) --debug --locked --root target/tools --version $(CYCLONEDX_VERSION) \
		cargo-cyclonedx

$(HELM):
	tests/kit/go-module helm.sh/helm/v3 v$(HELM_VERSION) build -ldflags \
		"-s -w -X helm.sh/helm/v3/internal/version.version=v$(HELM_VERSION)" \
		-o $(CURDIR)/$(HELM) ./cmd/helm

# With the tests' profile: the release profile optimises the whole program, which takes longer than
# the rest of the demo.
demo: ## a pod from its start to its end on a real containerd; needs root
	@echo "demo: on 2 cores under 4 minutes the first time, then 20 s"
	@echo "demo 1/3: fetching containerd; apt-get installs what this machine lacks of" \
		"$$(tests/kit/fetch-parts --packages)"
	tests/kit/fetch-parts
	@echo "demo 2/3: compiling 250 crates, 3 minutes the first time; cargo names each. The last two," \
		"kit and pause-sandboxer, take a minute"
	$(CARGO) build --locked --workspace --bins --example demo
	@echo "demo 3/3: running pods"
	target/debug/examples/demo target/debug/pause-sandboxer

parity: parts ## compare each field of pods with containerd's built-in controller; needs root and Go
	parts=$$(tests/kit/fetch-release $(LTS)) && PARTS_DIR=$$parts \
		$(CARGO) test --locked --workspace --test parity

test: parts unit demo fuzz-short ## unit tests, real pods, short fuzzing; needs root and Go

# The kit's skip() lists the tests that are skipped.
test-unprivileged: ## what any user can run; counts the tests that need root as skipped
	@mkdir -p target && rm -f target/skipped-tests && : >target/skipped-tests
	SKIPPED_TESTS=$(CURDIR)/target/skipped-tests $(CARGO) test --locked --lib \
		--test architecture --test docs --test packaging
	@echo "skipped: $$(wc -l <target/skipped-tests) tests, listed in target/skipped-tests"

test-node: test-vm test-deb ## both tests on a Debian node of their own

check: fmt lint doc deny machete chart ## format, lints, documentation, licences, charts; needs Go

fmt:
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check

# Cargo does not lint tests for another node unless they are named. CONTRIBUTING.md has the words.
lint:
	git grep -niwFf tests/banned-words.txt -- ':!tests/banned-words.txt' ':!*/images.rs'; \
		[ $$? = 1 ]
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --workspace --test deb --test systemd --test selinux \
		--test conformance --test kubernetes -- -D warnings
	fuzz/run lint

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items

# Without the advisories: they need a database that not every machine can fetch.
deny: $(DENY)
	$(DENY) --locked --workspace check --hide-inclusion-graph bans licenses sources

advisories: $(DENY) ## the dependencies against the RustSec database; needs GitHub
	$(DENY) --locked --workspace check --hide-inclusion-graph advisories

$(DENY):
	$(INSTALL) --debug --locked --root target/tools --version $(DENY_VERSION) cargo-deny

tools: $(DENY) $(MACHETE) $(HELM)

# Dependencies that no source uses.
machete: $(MACHETE)
	$(MACHETE) --skip-target-dir

$(MACHETE):
	$(INSTALL) --debug --locked --root target/tools --version $(MACHETE_VERSION) cargo-machete

# With many values the chart renders what Kubernetes' types accept.
chart: $(HELM) ## check the Helm chart; needs Go
	packaging/kubernetes/check-chart $(HELM)

parts: ## fetch Debian's containerd for the tests; installs packages that the machine lacks
	@echo "parts: apt-get installs what this machine lacks of $$(tests/kit/fetch-parts --packages)"
	tests/kit/fetch-parts
	packaging/prometheus/fetch-promtool target/tools/bin

unit: ## all tests of the workspace, with containerd's long-term release; needs root and Go
	tests/kit/suites all $(LTS)

lts: ## the suites with containerd's long-term release; needs root and Go
	tests/kit/suites whole $(LTS)

releases: ## the short suite with other containerd releases, and fuse-overlayfs; needs root and Go
	tests/kit/suites short $(RELEASES)
	tests/kit/suites fuse $(LTS)

# CHURN_CONTAINERS=1000 is a longer run of the random kills.
test-shim-alone: ## the pods' shim without the daemon: CRI, ctr, Docker, nerdctl; needs root and Go
	engines=$$(tests/kit/fetch-engines $(NERDCTL_VERSION)) && ENGINES_DIR=$$engines \
		tests/kit/suites alone $(ALONE)

# `make test MEANWHILE='make prepare'` does it while tests wait.
prepare: ## fetch and build what the other commands of CI need; needs root and Go
	for release in $(RELEASES); do tests/kit/fetch-release $$release >/dev/null || exit 1; done
	tests/kit/fetch-conformance $(CRI_TOOLS)
	tests/vm/build-image
	$(MAKE) $(DEB) $(RPM) tools
	packaging/release/programs $$(dpkg --print-architecture)
	tests/deb/earlier-packages

# CONFORMANCE="2.3.7 2.4.2" runs it on both releases that it knows.
conformance: ## critest, the test suite of CRI, with both controllers and shims; needs root and Go
	directory=$$(tests/kit/fetch-conformance $(CRI_TOOLS)) && \
	export CONFORMANCE_DIR="$$directory" RESULTS_DIR="$(CURDIR)/target/results" && \
	tests/kit/build-tests conformance >/dev/null && \
	for release in $(CONFORMANCE); do \
		parts=$$(tests/kit/fetch-release $$release) && \
		PARTS_DIR="$$parts" $(CARGO) test --locked --workspace --test conformance || exit 1; \
	done

# One case with its name: KUBERNETES_CASES=deployment
# Its image is of this architecture only, so that it must not replace one that is for publication.
test-kubernetes: $(HELM) ## pods of every kind in a cluster of its own; needs root, Go, cgroup v1
	$(MAKE) installer-image ARCHES=$$(dpkg --print-architecture) IMAGES=target/image/test
	parts=$$(tests/kit/fetch-release $(LTS)) && \
	kubernetes=$$(tests/kit/fetch-kubernetes $(KUBERNETES)) && \
	tests/kit/build-tests kubernetes >/dev/null && \
	echo "kubernetes env PARTS_DIR=$$parts KUBERNETES_DIR=$$kubernetes \
		RESULTS_DIR=$(CURDIR)/target/results CARGO_NET_OFFLINE=true \
		HELM=$(CURDIR)/$(HELM) \
		INSTALLER_IMAGE=$(CURDIR)/target/image/test/pause-sandboxer-installer.oci.tar \
		$(CARGO) test --locked --workspace --test kubernetes -- $(KUBERNETES_CASES)" | \
		tests/kit/lanes 1 $(CURDIR)/target/suites/kubernetes
	cat target/suites/kubernetes/kubernetes.log

# KUBERNETES_CASES=deployment is one case here, too.
test-kubernetes-vm: ## the same on a node with systemd and cgroup v2; needs root and Go
	parts=$$(tests/kit/fetch-release $(LTS)) && \
	kubernetes=$$(tests/kit/fetch-kubernetes $(KUBERNETES)) && \
	PARTS_DIR=$$parts KUBERNETES_DIR=$$kubernetes VM_MEMORY=$${VM_MEMORY:-4096} \
		VM_LIMIT=$${VM_LIMIT:-7200} tests/vm/test kubernetes $(KUBERNETES_CASES)

fuzz-short: ## fuzz what the daemon decodes of others for 30 s, or FUZZ_SECONDS
	fuzz/run short

fuzz: ## the same, optimised, each target for 10 minutes; see fuzz/README.md
	FUZZ_PROFILE=release FUZZ_EACH=$${FUZZ_EACH:-600} fuzz/run short

# SHARD=0/8 to SHARD=7/8 are eight parts; a run removes the results of the one before. A daemon with
# a fault may kill or unmount anything, so each package has a lane (tests/kit/lanes). Tests of the
# shim mostly wait, so ten run at a time.
mutants: $(CARGO_MUTANTS) ## faults in the sources that no test finds; hours; needs root, Go
	rm -rf target/mutants
	parts=$$(tests/kit/fetch-release $(LTS)) && mutate() { \
		echo "$$1 env CARGO_TARGET_DIR=$(CURDIR)/target/mutants/build-$$1 CARGO_INCREMENTAL=1 \
		CARGO_PROFILE_DEV_DEBUG=false CARGO_NET_OFFLINE=true PARTS_DIR=$$parts \
		$(CARGO_MUTANTS) mutants --output target/mutants/$$1 $(addprefix --file=,$(MUTANTS)) \
		--shard=$(SHARD) --sharding=round-robin $$2"; \
	} && { mutate daemon "-p pause-sandboxer -C=--lib -C=--test=life -C=--test=native"; \
		mutate shim "-p $(SHIM) -C=--lib -C=--test=task -- -- --test-threads=10"; } | \
		tests/kit/lanes 2 $(CURDIR)/target/mutants

$(CARGO_MUTANTS):
	$(INSTALL) --debug --locked --root target/tools --version $(MUTANTS_VERSION) cargo-mutants

# Pods, restarts and deaths at random; SOAK_SEED repeats a run.
soak: parts ## random churn for 10 minutes, or SOAK_SECONDS; needs root
	SOAK_SECONDS=$${SOAK_SECONDS:-600} $(CARGO) test --locked --test faults -- node_soak

test-deb: $(DEB) $(RPM) ## the packages on a node of their own, installed to removed; needs root, Go
	tools=$$(tests/kit/fetch-conformance $(CRI_TOOLS)) && CRICTL=$$tools/crictl tests/deb/run-in-vm

test-vm: ## the release's programs on a Debian node with systemd and cgroup v2; needs root and Go
	parts=$$(tests/kit/fetch-release $(LTS)) && export PARTS_DIR=$$parts && tests/vm/test && \
		tests/selinux/run-in-vm

# Not part of `make test-node`: emulating another architecture takes as long again.
test-arm64: ## the short suite on an emulated arm64 node; 20 minutes; needs root
	VM_ARCH=arm64 VM_LIMIT=3600 tests/vm/test

# For comparison: the shim of containerd's rust-extensions, as its crate is built.
$(RUST_SHIM):
	CARGO_TARGET_DIR=target/tools/build $(CARGO) install --locked --root target/tools \
		--version $(RUST_SHIM_VERSION) containerd-runc-shim

# With ONLY="cycles streams" these parts alone.
bench: parts shim $(RUST_SHIM) ## what pods cost, to target/bench/report.json; needs root, Go
	parts=$$(tests/kit/fetch-release $(LTS)) && PARTS_DIR=$$parts \
		$(CARGO) bench --locked --bench bench -- $(if $(ONLY),--only $(ONLY))

bench-quick: parts shim $(RUST_SHIM) ## the same with fewer rounds; 3 minutes; needs root and Go
	parts=$$(tests/kit/fetch-release $(LTS)) && PARTS_DIR=$$parts \
		$(CARGO) bench --locked --bench bench -- --quick

# With fewer pods: BUDGET_PODS=110. With crun in place of runc: WITH=tests/kit/with-crun. A run
# replaces the files of the one before.
budget: parts shim ## memory and times of up to 1000 pods, with both controllers; needs root and Go
	parts=$$(tests/kit/fetch-release $(LTS)) && PARTS_DIR=$$parts \
		$(WITH) $(CARGO) bench --locked --bench bench -- budget $${BUDGET_PODS:-1000}

# The older release is for the upgrade under a running pod.
compare: ## both controllers under failures, to docs/compare.md; hours; needs root, Go
	COMMIT=$$(git describe --always --dirty --exclude='*') && export COMMIT && \
	packaging/release/programs $$(dpkg --print-architecture) && \
	tests/kit/build-tests compare >/dev/null && \
	for release in $(COMPARE); do \
		older=$(LTS); [ "$$release" != $(LTS) ] || older=2.1.9; \
		older=$$(tests/kit/fetch-release $$older) && \
		parts=$$(tests/kit/fetch-release $$release) && \
		SANDBOXER=$(CURDIR)/target/programs/$$(dpkg --print-architecture)/pause-sandboxer \
			$(CARGO) test --locked --workspace \
			--test compare -- --pods $(PODS) "$$older" "$$parts" || exit 1; \
	done
	$(CARGO) test --locked --workspace --test compare -- --page $(COMPARE)

clean: ## remove everything that was built and fetched
	rm -rf target
