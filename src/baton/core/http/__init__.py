"""What decides at the HTTP border: who may stay connected, and when a client has had time enough."""
