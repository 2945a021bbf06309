//! Certificates for tests, and a client that uses and trusts them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use crate::common::PATIENCE;
use pagemill_crypt::serve::{Pem, TlsServer};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A certificate and its key, in PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

pub(crate) fn pem<'a>(from: &'a str, text: &'a str) -> Pem<'a> {
    Pem { from, text: text.as_bytes() }
}

/// An authority, and the certificates that it has signed.
pub(crate) struct Certificates {
    pub(crate) authority: String,
    pub(crate) server: Pair,
    pub(crate) client: Pair,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let signed = |purpose, names: &[&str]| {
            let key = KeyPair::generate().unwrap();
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let mut params = CertificateParams::new(names).unwrap();
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![purpose];
            Pair { certificate: params.signed_by(&key, &issuer).unwrap().pem(), key: key.serialize_pem() }
        };
        Self {
            authority,
            server: signed(ExtendedKeyUsagePurpose::ServerAuth, &["localhost", "127.0.0.1"]),
            client: signed(ExtendedKeyUsagePurpose::ClientAuth, &["a client"]),
        }
    }

    /// A server's TLS; with `asks`, clients need certificates.
    pub(crate) fn for_server(&self, asks: bool) -> TlsServer {
        let asked = asks.then_some(pem("authority", &self.authority));
        TlsServer::new(pem("certificate", &self.server.certificate), pem("key", &self.server.key), asked).unwrap()
    }

    /// A folder of certificates as GnuTLS clients expect it, with the client's own certificate or without.
    pub(crate) fn for_clients(&self, folder: &Path, with_own: bool) {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("ca-cert.pem"), &self.authority).unwrap();
        if with_own {
            fs::write(folder.join("client-cert.pem"), &self.client.certificate).unwrap();
            fs::write(folder.join("client-key.pem"), &self.client.key).unwrap();
        }
    }

    /// TLS over `stream`, on which STARTTLS was just agreed.
    pub(crate) fn connect<S: Read + Write>(&self, stream: S) -> StreamOwned<ClientConnection, S> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let chain = vec![CertificateDer::from_pem_slice(self.client.certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(self.client.key.as_bytes()).unwrap();
        let config = builder.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
    }
}

/// An option without data.
pub(crate) fn option(number: u32) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &[0; 4]].concat()
}

pub(crate) const STARTTLS: u32 = 5;
pub(crate) const ACK: u32 = 1;

/// An answer's option and kind; its text is skipped.
pub(crate) fn answer(stream: &mut impl Read) -> (u32, u32) {
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
    (word(8), word(12))
}

/// A client that has been greeted and has sent its flags.
pub(crate) fn greeted(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream
}

/// A client that has agreed on TLS, and may begin with it.
pub(crate) fn agreed(socket: &Path) -> UnixStream {
    let mut stream = greeted(socket);
    stream.write_all(&option(STARTTLS)).unwrap();
    assert_eq!(answer(&mut stream), (STARTTLS, ACK));
    stream
}
