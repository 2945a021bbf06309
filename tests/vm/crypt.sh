# Encrypted volumes against the kernel's dm-crypt: what Pagemill makes it opens, and a file system lives there.
# machine: -smp 2 -m 1536
# modules: dm-mod dm-crypt aesni-intel xts ecb cbc sha256_generic loop ext4 crc32c_generic
# programs: cryptsetup mkfs.ext4 e2fsck
# crate: pagemill-cli
set -u
head -c 32 /dev/urandom > key
# Where cryptsetup keeps its locks.
mkdir -p /run/cryptsetup

# Has dm-crypt open an image: the plain volume is at /dev/mapper/plain.
opened() {
    cryptsetup open --disable-keyring --key-file key "$1" plain
    cryptsetup status plain | grep -E 'cipher|sector size'
}

for kind in 'luks2 4096 512' 'luks2 512 256' 'luks1 512 512'; do
    set -- $kind
    echo "== $1, sectors of $2 bytes, keys of $3 bits"
    sectors="--sector-size $2"
    [ "$1" = luks1 ] && sectors=
    pagemill crypt format disk.img --size 48M --type "$1" $sectors --key-size "$3" \
        --kdf pbkdf2 --kdf-iterations 1000 --key-file key --force
    # What Pagemill made, the kernel opens; a file system lives on it.
    opened disk.img
    mkfs.ext4 -q /dev/mapper/plain
    mount /dev/mapper/plain /mnt
    head -c 5000000 /dev/urandom > /mnt/noise
    sha256sum < /mnt/noise > sum
    umount /mnt
    sha256sum < /dev/mapper/plain > whole
    cryptsetup close plain
    pagemill crypt test-passphrase disk.img --key-file key
    rm -f disk.img
done
