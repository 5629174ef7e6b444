//! Bytes to 8-bit RGB, by fixed rules:
//!
//! * The format is read from the content, never from the name: JPEG, PNG, WebP, BMP, TIFF, GIF.
//! * Grey is copied to the three channels; palettes are expanded; 16 bits become `(v * 255 + 32767) / 65535`, floating
//!   point is clamped to `[0, 1]` and rounded.
//! * Alpha is composited on white, at the depth of the file, before depth is reduced.
//! * CMYK and YCCK are converted by the decoder (no colour profile); profiles, gamma and primaries are ignored.
//! * The EXIF orientation is applied. Of animations and multi-page files the first frame is used.
//! * The header's size is checked before anything is decoded, and the decoder's memory is limited.
//! * A JPEG without its end marker is refused: the decoder would fill the rest with grey.
//! * A panic in a decoder is caught and becomes an error of that image.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{Cursor, Read};
use std::panic::catch_unwind;
use std::path::Path;

use image::error::{ImageError as DecoderError, LimitErrorKind};
use image::metadata::Orientation;
use image::{DynamicImage, ExtendedColorType, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};

use super::error::{ImageError, panic_message};

/// Decoders and rules whose change may change pixels; part of every source's fingerprint.
pub(crate) const DECODER: &str =
    "rules 1, image 0.25.10, zune-jpeg 0.5.15, png 0.18.1, image-webp 0.2.4, tiff 0.11.3, gif 0.14.2";

/// A decoded image and what its file was.
#[derive(Clone, Debug)]
pub struct Decoded {
    /// The pixels.
    pub image: RgbImage,
    /// Format and colour of the file.
    pub kind: Kind,
}

/// Format and colour of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    /// Name of the format, such as `JPEG`.
    pub format: &'static str,
    /// Colours in the file, such as `grey + alpha, 16 bits`.
    pub color: Cow<'static, str>,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.format, self.color)
    }
}

/// Decodes an image to 8-bit RGB by this module's rules.
///
/// # Errors
/// Says in words why these bytes are no usable image.
pub fn decode(bytes: &[u8], max_pixels: u64) -> Result<Decoded, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    let format = image::guess_format(bytes).map_err(|_| ImageError::NotAnImage(describe_start(bytes)))?;
    let name = format_name(format);
    catch_unwind(|| decode_as(bytes, format, name, max_pixels))
        .unwrap_or_else(|payload| Err(ImageError::Panicked { format: name, reason: panic_message(payload.as_ref()) }))
}

/// Reads and decodes a file.
pub(crate) fn decode_file(path: &Path, max_pixels: u64) -> Result<Decoded, ImageError> {
    decode(&read_file(path, max_pixels)?, max_pixels)
}

fn read_file(path: &Path, max_pixels: u64) -> Result<Vec<u8>, ImageError> {
    let failed = |error: std::io::Error| ImageError::Read(error.to_string());
    // Asked before opening: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(ImageError::Read("not a regular file".to_owned()));
    }
    if metadata.len() > max_memory(max_pixels) {
        return Err(ImageError::TooManyBytes { bytes: metadata.len(), max_pixels });
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize + 1);
    File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(failed)?;
    Ok(bytes)
}

/// Bytes that an image within the limit can need: four 32-bit channels, and room for tables and metadata.
fn max_memory(max_pixels: u64) -> u64 {
    max_pixels.saturating_mul(16).saturating_add(64 << 20)
}

fn decode_as(bytes: &[u8], format: ImageFormat, name: &'static str, max_pixels: u64) -> Result<Decoded, ImageError> {
    let explain = |error: DecoderError| explain(&error, name, max_pixels);
    let jpeg = (format == ImageFormat::Jpeg).then(|| JpegOutline::read(bytes));
    if jpeg.is_some_and(|jpeg| !jpeg.complete) {
        let reason = "its end marker is missing".to_owned();
        return Err(ImageError::Truncated { format: name, reason });
    }
    let mut limits = Limits::default();
    limits.max_alloc = Some(max_memory(max_pixels));
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits.clone());
    let mut decoder = reader.into_decoder().map_err(explain)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(ImageError::Damaged { format: name, reason: format!("it has {width} x {height} pixels") });
    }
    if u64::from(width) * u64::from(height) > max_pixels {
        return Err(ImageError::TooManyPixels { width, height, max_pixels });
    }
    limits.reserve(decoder.total_bytes()).map_err(explain)?;
    decoder.set_limits(limits).map_err(explain)?;
    // Unreadable metadata is no reason to refuse the pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let color = match (format, jpeg) {
        (ImageFormat::Png, _) => png_color(bytes).unwrap_or_else(|| color_name(decoder.original_color_type())),
        (_, Some(JpegOutline { components: 4, .. })) => "CMYK, 8 bits".into(),
        _ => color_name(decoder.original_color_type()),
    };
    let mut image = DynamicImage::ImageRgb8(to_rgb8(DynamicImage::from_decoder(decoder).map_err(explain)?));
    image.apply_orientation(orientation);
    Ok(Decoded { image: image.into_rgb8(), kind: Kind { format: name, color } })
}

fn to_rgb8(image: DynamicImage) -> RgbImage {
    let (width, height) = (image.width(), image.height());
    let pixels: Vec<u8> = match image {
        DynamicImage::ImageRgb8(image) => return image,
        DynamicImage::ImageLuma8(image) => image.as_raw().iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => image.pixels().flat_map(|p| [on_white(p[0], p[1]); 3]).collect(),
        DynamicImage::ImageRgba8(image) => {
            image.pixels().flat_map(|p| [0, 1, 2].map(|channel| on_white(p[channel], p[3]))).collect()
        }
        DynamicImage::ImageLuma16(image) => image.as_raw().iter().flat_map(|&v| [to_8_bits(v); 3]).collect(),
        DynamicImage::ImageLumaA16(image) => {
            image.pixels().flat_map(|p| [to_8_bits(on_white_16(p[0], p[1])); 3]).collect()
        }
        DynamicImage::ImageRgb16(image) => image.as_raw().iter().map(|&v| to_8_bits(v)).collect(),
        DynamicImage::ImageRgba16(image) => {
            image.pixels().flat_map(|p| [0, 1, 2].map(|channel| to_8_bits(on_white_16(p[channel], p[3])))).collect()
        }
        DynamicImage::ImageRgb32F(image) => image.as_raw().iter().map(|&v| float_to_8_bits(v)).collect(),
        DynamicImage::ImageRgba32F(image) => image
            .pixels()
            .flat_map(|p| [0, 1, 2].map(|channel| float_to_8_bits(p[channel] * p[3] + (1.0 - p[3]))))
            .collect(),
        other => return other.into_rgb8(), // the enum is open; version 0.25 has no other
    };
    RgbImage::from_raw(width, height, pixels).expect("three bytes for each pixel")
}

fn on_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

fn on_white_16(value: u16, alpha: u16) -> u16 {
    let (value, alpha) = (u64::from(value), u64::from(alpha));
    ((value * alpha + 65535 * (65535 - alpha) + 32767) / 65535) as u16
}

fn to_8_bits(value: u16) -> u8 {
    ((u32::from(value) * 255 + 32767) / 65535) as u8
}

fn float_to_8_bits(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0).round() as u8 // NaN becomes 0
}

fn explain(error: &DecoderError, format: &'static str, max_pixels: u64) -> ImageError {
    let reason = one_line(&innermost(error));
    match error {
        DecoderError::Unsupported(_) => ImageError::Unsupported { format, reason },
        DecoderError::Limits(limit) if matches!(limit.kind(), LimitErrorKind::InsufficientMemory) => {
            ImageError::TooMuchMemory { format, max_pixels }
        }
        DecoderError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            ImageError::Truncated { format, reason: "the data ends too early".to_owned() }
        }
        _ => ImageError::Damaged { format, reason },
    }
}

/// The decoders wrap their words in sentences about the format, which our own messages repeat.
fn innermost(error: &DecoderError) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
}

fn describe_start(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(16)];
    if start.iter().all(|&byte| byte == 0) {
        return "the content begins with zero bytes".to_owned();
    }
    match std::str::from_utf8(start) {
        Ok(text) if !text.chars().any(|c| c.is_control() && !c.is_whitespace()) => {
            format!("the content begins as text, `{}`", one_line(text))
        }
        _ => {
            let hex: Vec<String> = start.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            format!("the content begins with the bytes {}, as no image format does", hex.join(" "))
        }
    }
}

fn format_name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Jpeg => "JPEG",
        ImageFormat::Png => "PNG",
        ImageFormat::WebP => "WebP",
        ImageFormat::Bmp => "BMP",
        ImageFormat::Tiff => "TIFF",
        ImageFormat::Gif => "GIF",
        ImageFormat::Avif => "AVIF",
        ImageFormat::Pnm => "PNM",
        ImageFormat::Ico => "ICO",
        ImageFormat::Hdr => "HDR",
        ImageFormat::OpenExr => "OpenEXR",
        ImageFormat::Qoi => "QOI",
        ImageFormat::Dds => "DDS",
        ImageFormat::Farbfeld => "farbfeld",
        _ => "unknown",
    }
}

fn color_name(color: ExtendedColorType) -> Cow<'static, str> {
    use ExtendedColorType as C;
    match color {
        C::L1 => "grey, 1 bit".into(),
        C::L8 => "grey, 8 bits".into(),
        C::La8 => "grey + alpha, 8 bits".into(),
        C::Rgb8 => "RGB, 8 bits".into(),
        C::Rgba8 => "RGB + alpha, 8 bits".into(),
        C::L16 => "grey, 16 bits".into(),
        C::La16 => "grey + alpha, 16 bits".into(),
        C::Rgb16 => "RGB, 16 bits".into(),
        C::Rgba16 => "RGB + alpha, 16 bits".into(),
        C::Rgb32F => "RGB, floating point".into(),
        C::Rgba32F => "RGB + alpha, floating point".into(),
        C::Cmyk8 => "CMYK, 8 bits".into(),
        C::Cmyk16 => "CMYK, 16 bits".into(),
        other => format!("{other:?}").into(),
    }
}

/// Reads depth and colour type of a PNG header (RFC 2083, section 4.1.1): the decoder reports them after expansion.
fn png_color(bytes: &[u8]) -> Option<Cow<'static, str>> {
    let (&depth, &color) = (bytes.get(24)?, bytes.get(25)?);
    let color = match color {
        0 => "grey",
        2 => "RGB",
        3 => "palette",
        4 => "grey + alpha",
        6 => "RGB + alpha",
        _ => return None,
    };
    Some(format!("{color}, {depth} bit{}", if depth == 1 { "" } else { "s" }).into())
}

/// The marker structure of a JPEG (ITU T.81, annex B).
#[derive(Clone, Copy)]
struct JpegOutline {
    /// The first image's end marker is there.
    complete: bool,
    /// Colour components of the frame; 0 when no frame header was found.
    components: u8,
}

impl JpegOutline {
    fn read(bytes: &[u8]) -> Self {
        let mut outline = Self { complete: false, components: 0 };
        let mut at = 2; // after the start marker
        let mut in_scan = false;
        while let Some(skipped) = bytes.get(at..).and_then(|rest| rest.iter().position(|&byte| byte == 0xff)) {
            at += skipped;
            let Some(&marker) = bytes.get(at + 1) else { break };
            match marker {
                0xff => at += 1,                      // fill byte
                0x00 | 0x01 | 0xd0..=0xd8 => at += 2, // stuffed byte, restart marker: no payload
                0xd9 => {
                    outline.complete = true;
                    break;
                }
                // Between entropy-coded bytes only these can follow; anything else is damage that decoders survive.
                _ if in_scan && !matches!(marker, 0xc4 | 0xda..=0xdd | 0xfe) => at += 2,
                _ => {
                    let Some(&[high, low]) = bytes.get(at + 2..at + 4) else { break };
                    if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
                        outline.components = bytes.get(at + 9).copied().unwrap_or(0);
                    }
                    in_scan |= marker == 0xda;
                    at += 2 + usize::from(u16::from_be_bytes([high, low]));
                }
            }
        }
        outline
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use image::{GrayImage, ImageBuffer, Luma, LumaA, Rgb, Rgba};

    use super::*;

    const MAX: u64 = 1 << 20;

    /// Encodes an image.
    pub(crate) fn encode(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Vec::new();
        image.write_to(&mut Cursor::new(&mut bytes), format).unwrap();
        bytes
    }

    /// Makes an image that differs for each `seed` and is not symmetric.
    pub(crate) fn picture(width: u32, height: u32, seed: u32) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| {
            Rgb([(x * 5 + seed * 40) as u8, (y * 7 + seed) as u8, ((x + 2 * y) * 3) as u8])
        })
    }

    fn pixels(bytes: &[u8]) -> RgbImage {
        decode(bytes, MAX).unwrap().image
    }

    fn kind(bytes: &[u8]) -> String {
        decode(bytes, MAX).unwrap().kind.to_string()
    }

    #[test]
    fn lossless_formats_give_the_pixels_back() {
        let image = picture(7, 5, 1);
        for (format, name) in [
            (ImageFormat::Png, "PNG"),
            (ImageFormat::Bmp, "BMP"),
            (ImageFormat::Tiff, "TIFF"),
            (ImageFormat::WebP, "WebP"),
        ] {
            let bytes = encode(&image.clone().into(), format);
            assert_eq!(pixels(&bytes), image, "{name}");
            assert_eq!(kind(&bytes), format!("{name}, RGB, 8 bits"));
        }
    }

    #[test]
    fn jpeg_and_gif_come_close() {
        let image = RgbImage::from_fn(16, 16, |x, _| if x < 8 { Rgb([200, 30, 40]) } else { Rgb([20, 60, 220]) });
        for format in [ImageFormat::Jpeg, ImageFormat::Gif] {
            let found = pixels(&encode(&image.clone().into(), format));
            for (a, b) in found.as_raw().iter().zip(image.as_raw()) {
                assert!(a.abs_diff(*b) <= 24, "{format:?}: {a} and {b}");
            }
        }
    }

    #[test]
    fn grey_is_copied() {
        let image = GrayImage::from_fn(4, 3, |x, y| Luma([(x * 60 + y) as u8]));
        let bytes = encode(&image.clone().into(), ImageFormat::Png);
        assert_eq!(kind(&bytes), "PNG, grey, 8 bits");
        assert_eq!(pixels(&bytes), RgbImage::from_fn(4, 3, |x, y| Rgb([image.get_pixel(x, y)[0]; 3])));
        assert_eq!(kind(&encode(&image.into(), ImageFormat::Jpeg)), "JPEG, grey, 8 bits");
    }

    #[test]
    fn alpha_is_composited_on_white() {
        let image = ImageBuffer::from_fn(3, 1, |x, _| Rgba([10u8, 100, 200, [0, 128, 255][x as usize]]));
        let bytes = encode(&image.into(), ImageFormat::Png);
        assert_eq!(kind(&bytes), "PNG, RGB + alpha, 8 bits");
        assert_eq!(pixels(&bytes).into_raw(), [255, 255, 255, 132, 177, 227, 10, 100, 200]);
        let grey = ImageBuffer::from_fn(2, 1, |x, _| LumaA([40u8, [0, 255][x as usize]]));
        assert_eq!(pixels(&encode(&grey.into(), ImageFormat::Png)).into_raw(), [255, 255, 255, 40, 40, 40]);
    }

    #[test]
    fn sixteen_bits_are_rounded() {
        let values = [0u16, 128, 129, 32767, 65406, 65407];
        let grey = ImageBuffer::from_fn(6, 1, |x, _| Luma([values[x as usize]]));
        let bytes = encode(&DynamicImage::ImageLuma16(grey), ImageFormat::Png);
        assert_eq!(kind(&bytes), "PNG, grey, 16 bits");
        let found: Vec<u8> = pixels(&bytes).pixels().map(|p| p[0]).collect();
        assert_eq!(found, [0, 0, 1, 127, 254, 255]);
        for value in 0..=u16::MAX {
            assert_eq!(f64::from(to_8_bits(value)), (f64::from(value) / 257.0).round(), "{value}");
        }
        let rgb = ImageBuffer::from_pixel(1, 1, Rgb([257u16, 514, 65535]));
        assert_eq!(pixels(&encode(&DynamicImage::ImageRgb16(rgb), ImageFormat::Png)).into_raw(), [1, 2, 255]);
        let rgba = ImageBuffer::from_pixel(1, 1, Rgba([0u16, 65535, 257, 32768]));
        assert_eq!(pixels(&encode(&DynamicImage::ImageRgba16(rgba), ImageFormat::Png)).into_raw(), [127, 255, 128]);
        let grey_alpha = ImageBuffer::from_pixel(1, 1, LumaA([65535u16, 0]));
        assert_eq!(pixels(&encode(&DynamicImage::ImageLumaA16(grey_alpha), ImageFormat::Png)).into_raw(), [255; 3]);
    }

    #[test]
    fn floating_point_is_clamped() {
        let rgb = ImageBuffer::from_pixel(1, 1, Rgb([-1.0f32, 0.5, 7.0]));
        let bytes = encode(&DynamicImage::ImageRgb32F(rgb), ImageFormat::Tiff);
        assert_eq!(pixels(&bytes).into_raw(), [0, 128, 255]);
        assert_eq!(kind(&bytes), "TIFF, RGB, floating point");
        assert_eq!(float_to_8_bits(f32::NAN), 0);
    }

    /// Makes a palette PNG of 1 row by hand: the encoder of `image` writes none.
    fn palette_png() -> Vec<u8> {
        fn chunk(out: &mut Vec<u8>, kind: &[u8; 4], body: &[u8]) {
            out.extend((body.len() as u32).to_be_bytes());
            let start = out.len();
            out.extend(kind);
            out.extend(body);
            let crc = !out[start..].iter().fold(!0u32, |crc, &byte| {
                (0..8).fold(crc ^ u32::from(byte), |c, _| (c >> 1) ^ (0xedb8_8320 & (!(c & 1)).wrapping_add(1)))
            });
            out.extend(crc.to_be_bytes());
        }
        let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
        chunk(&mut png, b"IHDR", &[0, 0, 0, 2, 0, 0, 0, 1, 4, 3, 0, 0, 0]); // 2 x 1, 4 bits, palette
        chunk(&mut png, b"PLTE", &[9, 8, 7, 200, 100, 50]);
        chunk(&mut png, b"tRNS", &[255, 0]);
        // One stored deflate block: filter byte 0, then pixels 0 and 1.
        chunk(&mut png, b"IDAT", &[0x78, 1, 1, 2, 0, 0xfd, 0xff, 0, 1, 0, 3, 0, 2]);
        chunk(&mut png, b"IEND", &[]);
        png
    }

    #[test]
    fn palettes_are_expanded() {
        assert_eq!(kind(&palette_png()), "PNG, palette, 4 bits");
        assert_eq!(pixels(&palette_png()).into_raw(), [9, 8, 7, 255, 255, 255]);
    }

    /// Inserts an EXIF segment with the given orientation after a JPEG's start marker.
    fn with_orientation(jpeg: &[u8], orientation: u8) -> Vec<u8> {
        let mut exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
        exif.extend([orientation, 0, 0, 0, 0, 0, 0]);
        let mut bytes = jpeg[..2].to_vec();
        bytes.extend([0xff, 0xe1]);
        bytes.extend((exif.len() as u16 + 2).to_be_bytes());
        bytes.extend(exif);
        bytes.extend(&jpeg[2..]);
        bytes
    }

    #[test]
    fn orientation_is_applied() {
        let plain = encode(&picture(16, 8, 2).into(), ImageFormat::Jpeg);
        let upright = DynamicImage::ImageRgb8(pixels(&plain));
        let expected = [
            upright.clone(),
            upright.fliph(),
            upright.rotate180(),
            upright.flipv(),
            upright.rotate90().fliph(),
            upright.rotate90(),
            upright.rotate270().fliph(),
            upright.rotate270(),
        ];
        for (orientation, expected) in (1..).zip(expected) {
            assert_eq!(pixels(&with_orientation(&plain, orientation)), expected.into_rgb8(), "{orientation}");
        }
        assert_eq!(pixels(&with_orientation(&plain, 77)), upright.into_rgb8());
    }

    #[test]
    fn bombs_are_refused_by_their_header() {
        let mut png = palette_png();
        png[16..20].copy_from_slice(&50_000u32.to_be_bytes());
        png[20..24].copy_from_slice(&50_000u32.to_be_bytes());
        let crc = !png[12..29].iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| (c >> 1) ^ (0xedb8_8320 & (!(c & 1)).wrapping_add(1)))
        });
        png[29..33].copy_from_slice(&crc.to_be_bytes());
        let max_pixels = 100_000_000;
        let expected = ImageError::TooManyPixels { width: 50_000, height: 50_000, max_pixels };
        assert_eq!(decode(&png, max_pixels).unwrap_err(), expected);
        let small = encode(&picture(20, 10, 0).into(), ImageFormat::Jpeg);
        assert!(decode(&small, 200).is_ok());
        assert!(matches!(decode(&small, 199), Err(ImageError::TooManyPixels { width: 20, height: 10, .. })));
    }

    #[test]
    fn truncated_files_are_refused_in_every_format() {
        use ImageFormat::{Bmp, Gif, Jpeg, Png, Tiff, WebP};
        for format in [Jpeg, Png, WebP, Bmp, Tiff, Gif] {
            let bytes = encode(&picture(64, 64, 3).into(), format);
            for part in [bytes.len() / 4, bytes.len() / 2, bytes.len() * 9 / 10] {
                let found = decode(&bytes[..part], MAX);
                assert!(found.is_err(), "{format:?}, {part} of {} bytes", bytes.len());
            }
        }
        let jpeg = encode(&picture(64, 64, 3).into(), Jpeg);
        assert!(matches!(decode(&jpeg[..jpeg.len() - 2], MAX), Err(ImageError::Truncated { format: "JPEG", .. })));
        let mut followed = jpeg;
        followed.extend(b"trailing bytes of a camera");
        assert!(decode(&followed, MAX).is_ok());
    }

    #[test]
    fn what_is_no_image_is_named() {
        assert_eq!(decode(b"", MAX).unwrap_err(), ImageError::Empty);
        let page = decode(b"<!DOCTYPE html>\n<html>404", MAX).unwrap_err().to_string();
        assert_eq!(page, "not an image: the content begins as text, `<!DOCTYPE html>`");
        let bytes = decode(&[1, 2, 3, 4, 5, 6, 7, 8, 9], MAX).unwrap_err().to_string();
        assert!(bytes.contains("01 02 03 04 05 06 07 08,"), "{bytes}");
        assert!(decode(&[0; 100], MAX).unwrap_err().to_string().contains("zero bytes"));
        let avif = decode(b"\0\0\0\x20ftypavif\0\0\0\0avifmif1", MAX).unwrap_err();
        assert!(matches!(avif, ImageError::Unsupported { format: "AVIF", .. }), "{avif}");
    }

    #[test]
    fn random_damage_never_panics_out() {
        use ImageFormat::{Bmp, Gif, Jpeg, Png, Tiff, WebP};
        let mut stream = crate::rng::Stream::new(0, crate::rng::Purpose::Evaluation, &[]);
        for format in [Jpeg, Png, WebP, Bmp, Tiff, Gif] {
            let bytes = encode(&picture(24, 24, 3).into(), format);
            for _ in 0..200 {
                let mut bytes = bytes.clone();
                for _ in 0..3 {
                    let at = stream.below(bytes.len() as u64) as usize;
                    bytes[at] = stream.bits() as u8;
                }
                if let Err(error) = decode(&bytes, MAX) {
                    assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }

    #[test]
    fn versions_in_the_fingerprint_are_the_locked_ones() {
        let lock = include_str!("../../Cargo.lock");
        for package in DECODER.split(", ").skip(1) {
            let (name, version) = package.split_once(' ').unwrap();
            assert!(lock.contains(&format!("name = \"{name}\"\nversion = \"{version}\"")), "{package}");
        }
    }
}
