//! A network interface: what this program has to know of it (`netdevice(7)`, `linux/ethtool.h`).
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

use crate::Error;

/// `ETHTOOL_GCHANNELS`.
const GET_CHANNELS: u32 = 0x3c;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl std::str::FromStr for Mac {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, &'static str> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit()));
            *byte = part
                .and_then(|part| u8::from_str_radix(part, 16).ok())
                .ok_or("an address is like 02:00:00:00:00:01")?;
        }
        if parts.next().is_some() {
            return Err("an address has six bytes");
        }
        Ok(Self(bytes))
    }
}

/// An interface of the network namespace in which it was found.
pub struct Interface {
    /// Its name when it was found.
    pub name: String,
    /// The number by which the kernel knows it.
    pub index: u32,
    /// Its address.
    pub mac: Mac,
    /// The largest packet, without the Ethernet header, in bytes.
    pub mtu: usize,
    /// Queues that packets come by.
    pub receives: u32,
    /// Queues that packets leave by.
    pub sends: u32,
    asked_by: OwnedFd,
    /// While it is open, the interface takes packets for other addresses too.
    promiscuous: Option<OwnedFd>,
}

#[repr(C)]
struct Channels {
    cmd: u32,
    max: [u32; 4],
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

impl Interface {
    /// Finds an Ethernet interface by its name.
    ///
    /// # Errors
    /// If there is none, or if it is no Ethernet.
    pub fn find(name: &str) -> Result<Self, Error> {
        let failed = |errno| Error::io(format!("interface {name}"), errno);
        let fd = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).map_err(failed)?;
        if name.is_empty() || name.len() >= libc::IFNAMSIZ {
            return Err(missing(name));
        }
        let index = match netdevice::name_to_index(&fd, name) {
            Ok(index) => index,
            Err(Errno::NODEV) => return Err(missing(name)),
            Err(errno) => return Err(failed(errno)),
        };
        let mut this = Self {
            name: name.to_owned(),
            index,
            mac: Mac([0; 6]),
            mtu: 0,
            receives: 1,
            sends: 1,
            asked_by: fd,
            promiscuous: None,
        };
        let hardware = this.ask(libc::SIOCGIFHWADDR as _).map_err(failed)?;
        // SAFETY: this is the part that the request fills, and any bytes are a value of it.
        let hardware = unsafe { hardware.ifr_ifru.ifru_hwaddr };
        if hardware.sa_family != libc::ARPHRD_ETHER {
            return Err(Error::Unavailable {
                what: format!("{name} is no Ethernet"),
                next: "use an Ethernet interface; `ip link` lists them",
            });
        }
        for (to, from) in this.mac.0.iter_mut().zip(hardware.sa_data) {
            *to = from as u8;
        }
        let mtu = this.ask(libc::SIOCGIFMTU as _).map_err(failed)?;
        // SAFETY: as above.
        this.mtu = usize::try_from(unsafe { mtu.ifr_ifru.ifru_mtu }).unwrap_or(0);
        (this.receives, this.sends) = this.channels();
        Ok(this)
    }

    fn request(name: &str) -> libc::ifreq {
        // SAFETY: zeros are a value of it.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as _;
        }
        request
    }

    fn ask(&self, what: libc::Ioctl) -> Result<libc::ifreq, Errno> {
        self.ask_of(&self.name, what)
    }

    fn ask_of(&self, name: &str, what: libc::Ioctl) -> Result<libc::ifreq, Errno> {
        let mut request = Self::request(name);
        // SAFETY: these requests read and fill a `struct ifreq`.
        let done = unsafe { libc::ioctl(self.asked_by.as_raw_fd(), what, &raw mut request) };
        if done == 0 { Ok(request) } else { Err(last_error()) }
    }

    /// The queues that receive and those that send; one each for a driver that doesn't say.
    fn channels(&self) -> (u32, u32) {
        let mut channels = Channels { cmd: GET_CHANNELS, max: [0; 4], rx: 0, tx: 0, other: 0, combined: 0 };
        let mut request = Self::request(&self.name);
        request.ifr_ifru.ifru_data = (&raw mut channels).cast();
        // SAFETY: the request reads the command and fills `struct ethtool_channels`, which is what it is pointed at.
        let done = unsafe { libc::ioctl(self.asked_by.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
        let of = |alone: u32| if done == 0 { alone.max(channels.combined).max(1) } else { 1 };
        (of(channels.rx), of(channels.tx))
    }

    /// Whether it is up. `None` if it is gone.
    pub(crate) fn is_up(&self) -> Option<bool> {
        // It may have another name by now.
        let name = netdevice::index_to_name(&self.asked_by, self.index).ok()?;
        let flags = self.ask_of(&name, libc::SIOCGIFFLAGS as _).ok()?;
        // SAFETY: this is the part that the request fills, and any bytes are a value of it.
        Some(i32::from(unsafe { flags.ifr_ifru.ifru_flags }) & libc::IFF_UP != 0)
    }

    /// Has it take packets for all addresses, as long as this value exists (`packet(7)`).
    pub(crate) fn listen_to_all(&mut self) -> Result<(), Error> {
        let failed = |errno: Errno| Error::io(format!("{} takes only its own packets", self.name), errno);
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(failed(last_error()));
        }
        // SAFETY: the descriptor is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let all = libc::packet_mreq {
            mr_ifindex: self.index as i32,
            mr_type: libc::PACKET_MR_PROMISC as _,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        let len = size_of_val(&all) as libc::socklen_t;
        let (level, what) = (libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP);
        // SAFETY: the option is a `struct packet_mreq`.
        if unsafe { libc::setsockopt(fd.as_raw_fd(), level, what, (&raw const all).cast(), len) } != 0 {
            return Err(failed(last_error()));
        }
        self.promiscuous = Some(fd);
        Ok(())
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

pub(crate) fn missing(name: &str) -> Error {
    Error::Unavailable { what: format!("there is no interface {name}"), next: "`ip link` lists them" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("02:00:00:00:0a:ff".parse(), Ok(Mac([2, 0, 0, 0, 10, 255])));
        for wrong in
            ["", "02:00:00:00:0a", "02:00:00:00:0a:ff:00", "2:0:0:0:0:0", "+2:00:00:00:00:00", "zz:00:00:00:00:00"]
        {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
        assert_eq!(Mac([2, 0, 0, 0, 10, 255]).to_string(), "02:00:00:00:0a:ff");
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["", "no-such-one", "a-name-that-is-much-too-long", "lo"] {
            assert!(matches!(Interface::find(name), Err(Error::Unavailable { .. })), "{name}");
        }
    }
}
