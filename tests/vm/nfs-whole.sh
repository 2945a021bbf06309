# More of nfs, and what programmers do: git clones a repository into the mount, and a compiler builds a program there. tcc,
# because gcc with its headers would be larger than all the rest of the machine.
# tier: long
# minutes: 60
# machine: -smp 2 -m 2048
# modules: virtio_pci virtio_net nfs nfsv3
# programs: fsx pjdfstest dbench fio cmp git tcc make
# files: nfs-checks nfs-pjdfstest.toml
# host: nfs --no-root-squash --insecure --cache 32M --json
. /etc/nfs-checks
ready
mounted
for seed in 1 2 3 4; do attempt fsx-$seed exercise 5000 $seed; done
attempt pjdfstest posix
attempt dbench many 100 60
attempt fio-buffered verified 64M 0
attempt fio-direct verified 16M 1
attempt names names 10000
attempt git repository 300
attempt compiler built 100
attempt counters counters again
attempt restarted restarted 10
umount /mnt
# Small transfers, each synchronous, and nothing of the attributes cached: other calls of the client.
mounted rsize=8192,wsize=8192,sync,noac
attempt fsx-small exercise 2000 5
attempt fio-small verified 1M 0
attempt names-small names 500
umount /mnt
attempt counters-at-the-end counters
