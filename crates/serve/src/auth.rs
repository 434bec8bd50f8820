//! Who asks: the key of a request, found before anything of its query or body is read.
//!
//! A handler names the scope that its endpoint needs by the type of its argument. What the key may do
//! with a policy is asked later, when the policy is known.

use std::{collections::BTreeMap, marker::PhantomData, sync::Arc};

use axum::{
    Extension, RequestPartsExt,
    extract::{FromRequestParts, Path},
    http::{Extensions, request::Parts},
};
use stockade_protocol::service::{Key, Scope};

use crate::{front::Front, http::Peer, keys, listen::Exchange, problem::Problem, sessions::Session};

/// The key of a request, which has the scope that `S` names.
pub struct KeyFor<S> {
    /// The key.
    pub key: Key,
    needs: PhantomData<S>,
}

/// What an endpoint needs of a key.
pub trait Needs {
    /// None: any key will do.
    const SCOPE: Option<Scope>;
}

/// Nothing but a key.
pub struct Any;
/// [`Scope::Run`].
pub struct ToRun;
/// [`Scope::Keep`].
pub struct ToKeep;
/// [`Scope::Watch`].
pub struct ToWatch;
/// [`Scope::Facade`].
pub struct ToFacade;

impl Needs for Any {
    const SCOPE: Option<Scope> = None;
}
impl Needs for ToRun {
    const SCOPE: Option<Scope> = Some(Scope::Run);
}
impl Needs for ToKeep {
    const SCOPE: Option<Scope> = Some(Scope::Keep);
}
impl Needs for ToWatch {
    const SCOPE: Option<Scope> = Some(Scope::Watch);
}
impl Needs for ToFacade {
    const SCOPE: Option<Scope> = Some(Scope::Facade);
}

impl<S: Needs> FromRequestParts<Arc<Front>> for KeyFor<S> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Arc<Front>) -> Result<Self, Problem> {
        let uid = parts.extract::<Extension<Peer>>().await.ok().and_then(|Extension(peer)| peer.uid);
        let settings = front.settings();
        let key = keys::find(&settings.keys, &parts.headers, &parts.uri, uid)?;
        note_key(&parts.extensions);
        if let Some(scope) = S::SCOPE {
            keys::check_scope(key, scope)?;
        }
        Ok(KeyFor { key: key.clone(), needs: PhantomData })
    }
}

/// Notes that a request has a good key: its connection keeps its place until the answer.
pub fn note_key(of_request: &Extensions) {
    if let Some(exchange) = of_request.get::<Arc<Exchange>>() {
        exchange.has_key();
    }
}

/// A session that the path names, and its key, which still may use the session's policy.
pub struct OfSession(pub Key, pub Arc<Session>);

impl FromRequestParts<Arc<Front>> for OfSession {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Arc<Front>) -> Result<Self, Problem> {
        let KeyFor { key, .. } = KeyFor::<ToKeep>::from_request_parts(parts, front).await?;
        let places = parts.extract::<Path<BTreeMap<String, String>>>().await;
        let number = places.ok().and_then(|Path(mut places)| places.remove("session")).unwrap_or_default();
        let session = front.sessions.find(&number, &key)?;
        Ok(OfSession(key, session))
    }
}
