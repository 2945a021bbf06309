# A minute of each stress on aarch64 with four processors, and the tests in which threads meet.
# arch: aarch64
# tier: long
# minutes: 60
# machine: -smp 4 -m 2048
# tests: pagemill-os pagemill
# crate: pagemill-cli
for backend in rseq portable; do
    export PAGEMILL_BACKEND=$backend
    tests pagemill-os drain::
    tests pagemill drain:: fork:: races:: signals:: waits:: waits_and_lists::
    check pagemill-cli stress-$backend pagemill stress --seconds 60 --seed 1 --threads 4
    check pagemill-cli stress-$backend-tight pagemill stress --seconds 60 --seed 1 --threads 4 --tight
done
