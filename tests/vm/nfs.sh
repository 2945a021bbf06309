# The NFSv3 server
# machine: -smp 2 -m 1536
# modules: virtio_pci virtio_net nfs nfsv3
# programs: fsx pjdfstest dbench fio
# files: nfs-checks
# host: nfs
. /etc/nfs-checks
network
host say hello
echo "mount test $server"; date
mounted
grep mnt /proc/mounts
df /mnt
date
echo hello > /mnt/a; sync; sha256sum /mnt/a; host sum a
time fsx -N 300 -S 1 -P /tmp /mnt/fsx || true
mkdir /mnt/pj; chmod 755 /mnt
printf 'root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\ntests:x:1001:1001::/:/bin/sh\n' > /etc/passwd
printf 'root:x:0:\nnobody:x:65534:\ntests:x:1001:\n' > /etc/group
cat > pj.toml <<'X'
[features]
file_flags = []
utimensat = {}
utime_now = {}
[settings]
naptime = 0.02
[dummy_auth]
entries = [["nobody","nobody"],["tests","tests"]]
X
time pjdfstest -c pj.toml -p /mnt/pj || true
