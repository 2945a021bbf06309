//! TLS on a client's socket, by `rustls`. It encrypts the bytes that the connection sends, and decrypts the bytes that
//! it receives. The socket stays non-blocking.
//!
//! Invariants: nothing is encrypted for a client while earlier encrypted bytes have not been sent, so a client that
//! receives nothing costs at most [`AHEAD`] bytes here, and its answers wait in its outbox (T1). One call makes at most
//! [`READS`] reads of the socket, so a client that sends empty records gets its turn and no more (T2). After an error
//! only the alert is sent (T3).
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::socket::{Moved, Raw};
use crate::Error;

/// Bytes that are encrypted before the socket has taken them.
const AHEAD: usize = 64 << 10;
/// Reads of the socket for one call.
const READS: usize = 16;

/// A server's certificate, and the authorities of its clients. A clone is the same one: [`TlsServer::renew`] changes it
/// for all.
#[derive(Clone, Debug)]
pub struct TlsServer(Arc<RwLock<Arc<ServerConfig>>>);

/// A text in PEM, and its origin for error messages.
#[derive(Clone, Copy)]
pub struct Pem<'a> {
    /// The file's name, or another description for the user.
    pub from: &'a str,
    /// The text.
    pub text: &'a [u8],
}

impl TlsServer {
    /// From texts in PEM: the server's certificate and its chain, the certificate's key, and, if clients need
    /// certificates too, the authorities that sign those. TLS 1.2 and 1.3; sessions are not resumed.
    ///
    /// # Errors
    /// [`Error::Request`] for an invalid text, or for a key that is not the certificate's. It names the text and says
    /// what to do.
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
        Ok(Self(Arc::new(RwLock::new(Arc::new(config)))))
    }

    /// Clients that begin TLS from now on get what `by` has; sessions that have begun go on as they are.
    ///
    /// ```
    /// # use pagemill_crypt::serve::{Pem, TlsServer};
    /// # fn renewed(serving: &TlsServer, chain: &[u8], key: &[u8]) -> Result<(), pagemill_crypt::Error> {
    /// let (chain, key) = (Pem { from: "server.pem", text: chain }, Pem { from: "server.key", text: key });
    /// serving.renew(&TlsServer::new(chain, key, None)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn renew(&self, by: &Self) {
        let config = by.config();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
    }

    fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
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

/// The authorities that a client of a far end trusts, its own certificate, and the name in the far end's.
#[derive(Clone, Debug)]
pub(super) struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClient {
    /// From texts in PEM: the authorities, and the client's chain and key if it has them.
    pub(super) fn new(authorities: Pem<'_>, own: Option<(Pem<'_>, Pem<'_>)>, name: &str) -> Result<Self, Error> {
        let refused = |from: &str, why: String| Error::Request(format!("{from}: {why}: name the files of this client"));
        let mut roots = RootCertStore::empty();
        for authority in certificates(authorities, "the authorities that sign the far end's certificate")? {
            roots.add(authority).map_err(|error| refused(authorities.from, error.to_string()))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| refused(authorities.from, error.to_string()))?;
        let builder = builder.with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                let private = PrivateKeyDer::from_pem_slice(key.text);
                let private = private.map_err(|error| refused(key.from, format!("no private key in PEM ({error})")))?;
                let chain_of_client = certificates(chain, "this client's certificate")?;
                let config = builder.with_client_auth_cert(chain_of_client, private);
                config.map_err(|error| refused(chain.from, error.to_string()))?
            }
        };
        let name = ServerName::try_from(name.to_owned()).map_err(|error| refused(name, error.to_string()))?;
        Ok(Self { config: Arc::new(config), name })
    }
}

/// One client's TLS session, or the session with a far end.
#[derive(Debug)]
pub(super) struct TlsSession {
    session: Connection,
    /// Decrypted bytes that were not handed out yet.
    pending: usize,
    is_broken: bool,
    /// What broke it.
    why: Option<rustls::Error>,
}

impl TlsSession {
    /// A session before the client's first byte; `None` if there is no memory for one.
    pub(super) fn new(server: &TlsServer) -> Option<Self> {
        let session = ServerConnection::new(server.config()).ok()?;
        Some(Self::of(Connection::Server(session)))
    }

    /// A session with a far end, before this side's first byte.
    pub(super) fn to_far(client: &TlsClient) -> Result<Self, rustls::Error> {
        let session = ClientConnection::new(Arc::clone(&client.config), client.name.clone())?;
        Ok(Self::of(Connection::Client(session)))
    }

    fn of(mut session: Connection) -> Self {
        session.set_buffer_limit(Some(AHEAD));
        Self { session, pending: 0, is_broken: false, why: None }
    }

    /// What broke the session, if it is broken.
    pub(super) fn why(&self) -> Option<&rustls::Error> {
        self.why.as_ref()
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
                // It ended the session, or was cut off.
                Err(_) => return Moved::Ended,
            }
            match self.session.read_tls(&mut Stream(raw)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Moved::NotNow,
                Err(_) => return Moved::Ended,
            }
            match self.session.process_new_packets() {
                Ok(state) => self.pending = state.plaintext_bytes_to_read(),
                Err(error) => (self.is_broken, self.why) = (true, Some(error)),
            }
            // Sends an answer of the handshake, or the alert. The rest is sent when the socket takes it.
            if self.flush(raw) == Moved::Ended {
                return Moved::Ended;
            }
        }
        Moved::NotNow
    }

    /// Copies decrypted bytes to `vector`. An error ends the session.
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
        // Earlier bytes first (T1), and nothing after an error (T3).
        match self.flush(raw) {
            Moved::Bytes(_) if self.is_broken => return Moved::Ended,
            Moved::Bytes(_) => {}
            other => return other,
        }
        match self.session.writer().write_vectored(vector) {
            // The rest is sent later; `has_unsent` reports it.
            Ok(count) if self.flush(raw) != Moved::Ended => Moved::Bytes(count),
            _ => Moved::Ended,
        }
    }

    /// Sends encrypted bytes. Returns how many, or `NotNow` if some are left.
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

    /// Sends the closing alert, as far as the socket takes it now.
    pub(super) fn say_goodbye(&mut self, raw: &Raw) {
        self.session.send_close_notify();
        let _ = self.flush(raw);
    }
}

/// What may help a client against what broke its session: words to be put behind the reason.
pub(super) fn advice(why: &rustls::Error) -> &'static str {
    use rustls::{AlertDescription as Alert, CertificateError as Unfit};
    match why {
        rustls::Error::AlertReceived(Alert::CertificateRequired | Alert::BadCertificate | Alert::UnknownCA) => {
            ": have client-cert.pem and client-key.pem, signed by an authority that the server trusts, in tls-certificates"
        }
        rustls::Error::InvalidCertificate(Unfit::NotValidForName | Unfit::NotValidForNameContext { .. }) => {
            ": name the server as its certificate does, or give that name as tls-hostname"
        }
        // The latter if two authorities have one name.
        rustls::Error::InvalidCertificate(Unfit::UnknownIssuer | Unfit::BadSignature) => {
            ": ca-cert.pem in tls-certificates has to be the authority that signed it"
        }
        _ => "",
    }
}

/// The socket, for `rustls`.
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
