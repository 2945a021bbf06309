//! Which clients may connect.
use std::net::IpAddr;
use std::str::FromStr;

/// An address, or all addresses that begin as it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Network {
    address: IpAddr,
    /// How many bits have to be the same.
    prefix: u32,
}

fn bits(address: IpAddr) -> (u128, u32) {
    match address.to_canonical() {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    }
}

impl Network {
    pub(super) fn has(&self, peer: IpAddr) -> bool {
        let ((own, len), (peer, peer_len)) = (bits(self.address), bits(peer));
        let differ = own ^ peer;
        len == peer_len && differ.checked_shr(len - self.prefix).unwrap_or(0) == 0
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || format!("{text:?} is no address, as 10.0.0.7, and no network, as 10.0.0.0/24");
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let len = bits(address).1;
        let prefix = prefix.map_or(Ok(len), |prefix| prefix.parse().map_err(|_| wrong()))?;
        if prefix > len {
            return Err(format!("{text:?}: this address has {len} bits, so give /{len} at most"));
        }
        Ok(Self { address, prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_that_begin_as_it_does() {
        let has = |network: &str, peer: &str| network.parse::<Network>().unwrap().has(peer.parse().unwrap());
        assert!(has("10.0.0.0/24", "10.0.0.255") && !has("10.0.0.0/24", "10.0.1.0"));
        assert!(has("10.0.0.7", "10.0.0.7") && !has("10.0.0.7", "10.0.0.8"));
        assert!(has("0.0.0.0/0", "192.0.2.1") && !has("0.0.0.0/0", "2001:db8::1"));
        assert!(has("2001:db8::/32", "2001:db8:ffff::1") && !has("2001:db8::/32", "2001:db9::1"));
        assert!(has("::/0", "2001:db8::1") && !has("::/0", "192.0.2.1"));
        // A socket of both families has addresses of the older one in the newer one's form.
        assert!(has("192.0.2.0/24", "::ffff:192.0.2.9"));
        for wrong in ["", "10.0.0", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/", "host", "::/129"] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }
}
