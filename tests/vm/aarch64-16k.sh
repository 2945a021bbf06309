# All tests of the library on a kernel whose pages have 16 KiB.
# arch: aarch64
# tier: long
# minutes: 120
# kernel-package: linux-image-6.12-arm64-16k
# machine: -smp 2 -m 3072
# tests: pagemill-core.unit pagemill-core pagemill-os.unit pagemill-os pagemill.unit pagemill
# crate: pagemill-cli
# A tenth of what the models try elsewhere: what differs here is what the system is told.
export PROPTEST_CASES=32
for program in pagemill-core.unit pagemill-core pagemill-os.unit pagemill-os pagemill.unit pagemill; do
    tests $program
done
for backend in rseq portable; do
    PAGEMILL_BACKEND=$backend check pagemill-cli stress-$backend pagemill stress --seconds 10 --seed 1 --threads 2
done
