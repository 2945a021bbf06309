# All tests of the library on aarch64, on each backend, and a minute of each stress.
# arch: aarch64
# tier: long
# minutes: 120
# machine: -smp 2 -m 3072
# tests: pagemill-core.unit pagemill-core pagemill-os.unit pagemill-os pagemill.unit pagemill
# crate: pagemill-cli
echo 16 > /proc/sys/vm/nr_hugepages
for backend in rseq portable; do
    export PAGEMILL_BACKEND=$backend
    for program in pagemill-core.unit pagemill-core pagemill-os.unit pagemill-os pagemill.unit pagemill; do
        tests $program
    done
    check pagemill-cli stress-$backend pagemill stress --seconds 60 --seed 1 --threads 2
    check pagemill-cli stress-$backend-tight pagemill stress --seconds 60 --seed 1 --threads 2 --tight
done
