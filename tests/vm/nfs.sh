# `pagemill nfs serve` on the host, used by the kernel's client: a file at random places, POSIX's rules, many files, contents
# verified, a server that is killed, and one with too little memory. nfs-whole does more of it.
# minutes: 4
# machine: -smp 2 -m 1536
# modules: virtio_pci virtio_net nfs nfsv3
# programs: fsx pjdfstest dbench fio cmp
# files: nfs-checks nfs-pjdfstest.toml
# host: nfs --no-root-squash --insecure --cache 32M --json
export LIMIT=240
. /etc/nfs-checks
ready
mounted
attempt fsx exercise 500 1
attempt pjdfstest posix
attempt dbench many 12 10
attempt fio-buffered verified 4M 0
attempt fio-direct verified 2M 1
attempt names names 1000
attempt counters counters again
attempt restarted restarted 2
umount /mnt
attempt counters-at-the-end counters
# Too little memory.
host start "$short"
mounted
attempt starved starved 6
attempt ended-while-starved ended_while_starved 20
