//! TLS on a client's socket, by `rustls`: what the connection hands over is encrypted in here, and what it gets was
//! decrypted in here. The socket stays what it is, one that does not wait.
//!
//! Invariants: nothing is encrypted for a client while what was encrypted before has not gone out, so a client that takes
//! nothing costs [`AHEAD`] bytes here, and its answers wait where those of others do (T1). One call takes at most
//! [`READS`] reads of the socket, whatever they hold: who sends records without a byte in them gets its turn and no more
//! (T2). After an error only the alert goes out (T3).
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::socket::{Moved, Raw};
use crate::Error;

/// Bytes that are encrypted before the socket has taken them.
const AHEAD: usize = 64 << 10;
/// Reads of the socket for one call.
const READS: usize = 16;

/// What a server shows to its clients, and whom it lets in.
#[derive(Clone, Debug)]
pub struct TlsServer(Arc<ServerConfig>);

/// A text in PEM, and where it comes from, for what there is to say of it.
#[derive(Clone, Copy)]
pub struct Pem<'a> {
    /// The file's name, or whatever tells a user which text it is.
    pub from: &'a str,
    /// What is in it.
    pub text: &'a [u8],
}

impl TlsServer {
    /// From texts in PEM: the server's certificate and those that lead to its authority, the certificate's key, and, if
    /// clients have to show one too, the authorities of theirs. TLS 1.2 and 1.3; no session is kept or resumed.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no such text, and a key that is not the certificate's: which it is, and what to do.
    pub fn new(chain: Pem<'_>, key: Pem<'_>, client_authorities: Option<Pem<'_>>) -> Result<Self, Error> {
        let certificates_of_server = certificates(chain, "the server's certificate and those of its authorities")?;
        let private = PrivateKeyDer::from_pem_slice(key.text).map_err(|error| {
            Error::Request(format!(
                "{}: no private key in PEM ({error}): name the file with the certificate's, without a passphrase \
                 (openssl pkey takes it off)",
                key.from
            ))
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let refused = |error: rustls::Error| {
            let (chain, key) = (chain.from, key.from);
            Error::Request(format!("{chain} with {key}: {error}: name a certificate of a server, and its own key"))
        };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(refused)?;
        let builder = match client_authorities {
            None => builder.with_no_client_auth(),
            Some(authorities) => {
                let what = "the authorities that sign clients' certificates";
                let unfit = |why: String| Error::Request(format!("{}: {why}: name {what}", authorities.from));
                let mut roots = RootCertStore::empty();
                for authority in certificates(authorities, what)? {
                    roots.add(authority).map_err(|error| unfit(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build().map_err(|error| unfit(error.to_string()))?)
            }
        };
        let mut config = builder.with_single_cert(certificates_of_server, private).map_err(refused)?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }
}

fn certificates(pem: Pem<'_>, wanted: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.text).collect();
    let why = match all {
        Ok(all) if !all.is_empty() => return Ok(all),
        Ok(_) => String::new(),
        Err(error) => format!(" ({error})"),
    };
    let from = pem.from;
    Err(Error::Request(format!(
        "{from}: no certificate in PEM{why}: name the file with {wanted} (openssl x509 makes PEM of other forms)"
    )))
}

/// One client's.
#[derive(Debug)]
pub(super) struct TlsSession {
    session: ServerConnection,
    /// Bytes that were decrypted and not handed out.
    pending: usize,
    is_broken: bool,
}

impl TlsSession {
    /// Before the client's first byte of it; none if there is no memory for one.
    pub(super) fn new(server: &TlsServer) -> Option<Self> {
        let mut session = ServerConnection::new(Arc::clone(&server.0)).ok()?;
        session.set_buffer_limit(Some(AHEAD));
        Some(Self { session, pending: 0, is_broken: false })
    }

    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.session.wants_write()
    }

    /// As [`super::socket::Socket::receive`].
    pub(super) fn receive(&mut self, raw: &Raw, vector: &mut [IoSliceMut<'_>]) -> Moved {
        // T2.
        for _ in 0..READS {
            match self.hand_out(vector) {
                Ok(0) if self.is_broken => return Moved::Ended,
                Ok(0) => {}
                Ok(count) => return Moved::Bytes(count),
                // It said goodbye, or was cut off.
                Err(_) => return Moved::Ended,
            }
            match self.session.read_tls(&mut Stream(raw)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Moved::NotNow,
                Err(_) => return Moved::Ended,
            }
            match self.session.process_new_packets() {
                Ok(state) => self.pending = state.plaintext_bytes_to_read(),
                Err(_) => self.is_broken = true,
            }
            // An answer of the handshake's, or the alert; what does not go now goes when the socket takes it.
            if self.flush(raw) == Moved::Ended {
                return Moved::Ended;
            }
        }
        Moved::NotNow
    }

    /// Copies out what was decrypted. An error is the end of it.
    fn hand_out(&mut self, vector: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for slice in vector {
            let mut got = 0;
            while got < slice.len() {
                match self.session.reader().read(&mut slice[got..]) {
                    Ok(0) if total + got == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(0) => break,
                    Ok(count) => got += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if total + got == 0 => return Err(error),
                    Err(_) => break,
                }
            }
            total += got;
            if got < slice.len() {
                break;
            }
        }
        self.pending = self.pending.saturating_sub(total);
        Ok(total)
    }

    /// As [`super::socket::Socket::send`]: the bytes are encrypted, and may have to wait for the socket.
    pub(super) fn send(&mut self, raw: &Raw, vector: &[IoSlice<'_>]) -> Moved {
        // All of it first (T1), and after an error nothing else (T3).
        match self.flush(raw) {
            Moved::Bytes(_) if self.is_broken => return Moved::Ended,
            Moved::Bytes(_) => {}
            other => return other,
        }
        match self.session.writer().write_vectored(vector) {
            // What is in there goes out by and by, and `has_unsent` tells.
            Ok(count) if self.flush(raw) != Moved::Ended => Moved::Bytes(count),
            _ => Moved::Ended,
        }
    }

    /// Sends what is encrypted. Bytes are how many; `NotNow` if some are left.
    pub(super) fn flush(&mut self, raw: &Raw) -> Moved {
        let mut total = 0;
        while self.session.wants_write() {
            match self.session.write_tls(&mut Stream(raw)) {
                Ok(count) => total += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Moved::NotNow,
                Err(_) => return Moved::Ended,
            }
        }
        Moved::Bytes(total)
    }

    /// Says that nothing more will come, as far as that can be said now.
    pub(super) fn say_goodbye(&mut self, raw: &Raw) {
        self.session.send_close_notify();
        let _ = self.flush(raw);
    }
}

/// The socket as `rustls` wants it.
struct Stream<'a>(&'a Raw);

fn moved(moved: Moved) -> io::Result<usize> {
    match moved {
        Moved::Bytes(count) => Ok(count),
        Moved::NotNow => Err(io::ErrorKind::WouldBlock.into()),
        Moved::Ended => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        moved(self.0.receive(&mut [IoSliceMut::new(bytes)]))
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        moved(self.0.send(&[IoSlice::new(bytes)]))
    }
    fn write_vectored(&mut self, vector: &[IoSlice<'_>]) -> io::Result<usize> {
        moved(self.0.send(vector))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
