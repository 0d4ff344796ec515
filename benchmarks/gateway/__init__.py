"""What a call costs the gateway, next to other gateways and to bare forwarders."""
